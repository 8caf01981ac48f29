"""The target's side of a training step: captured states, and what the losses need to know of its distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.trainer.batch import Batch, Features

_MASKED = -1e30


def capture(target, batch: Batch, capture_layers: tuple[int, ...], draft_of_target: jax.Array) -> Features:
    """Runs the target over whole rows; no logits are kept.

    Args:
      target: a `Decoder`.
      capture_layers: boundaries to return.
      draft_of_target: [V] draft id of every target id, -1 for those outside the draft vocabulary.
    """
    hidden, aux = target.read(batch.tokens, batch.positions, batch.documents, capture=capture_layers)
    best, log_mass = teacher_statistics(target.head.weight[...], hidden)
    return jax.lax.stop_gradient(Features(aux, hidden, jnp.take(draft_of_target, best, mode="clip"), log_mass))


def teacher_statistics(table: jax.Array, hidden: jax.Array, block: int = 4096) -> tuple[jax.Array, jax.Array]:
    """Streams the target's head over its vocabulary.

    Args:
      table: [V, D] the head's rows.
      hidden: [B, T, D] final states, after the norm.
      block: vocabulary rows per step.

    Returns:
      (best [B, T] int32 id of the largest logit, the lowest of equals; log-sum-exp [B, T] float32).
    """
    V, _ = table.shape
    block = min(block, V)

    def step(carry, i):
        top, best, total = carry
        begin = jnp.minimum(i * block, V - block)  # the last block overlaps the one before
        rows = jax.lax.dynamic_slice_in_dim(table, begin, block, axis=0)
        logits = jnp.einsum("btd,vd->btv", hidden, rows, preferred_element_type=jnp.float32)
        seen_before = begin + jnp.arange(block) < i * block
        logits = jnp.where(seen_before[None, None, :], _MASKED, logits)
        block_top = logits.max(axis=-1)
        new_top = jnp.maximum(top, block_top)
        total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[..., None]).sum(axis=-1)
        best = jnp.where(block_top > top, begin + jnp.argmax(logits, axis=-1).astype(jnp.int32), best)
        return (new_top, best, total), None

    shape = hidden.shape[:2]
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    (top, best, total), _ = jax.lax.scan(step, start, jnp.arange(-(-V // block)))
    return best, top + jnp.log(total)


def draft_ids(draft_to_target: jax.Array | None, vocab_size: int) -> jax.Array:
    """[V] draft id of every target id, -1 for those outside; the inverse of a drafter's vocabulary table."""
    if draft_to_target is None:
        return jnp.arange(vocab_size, dtype=jnp.int32)
    ids = jnp.arange(draft_to_target.shape[0], dtype=jnp.int32)
    return jnp.full((vocab_size,), -1, jnp.int32).at[draft_to_target].set(ids)
