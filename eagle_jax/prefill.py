"""Running prompts through the target, chunk by chunk, with the drafter beside it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.layers import cache as kv_cache
from eagle_jax.records import Confirmed, KVCache, record


@record
class Prompts:
    """Prompts padded on the right.

    tokens: [B, P + 1], P a multiple of the chunk; lengths: [B], 1 .. P.
    """

    tokens: jax.Array
    lengths: jax.Array


def prefill(
    target, drafter, prompts: Prompts, cache: KVCache, draft_cache: KVCache | None, chunk: int
) -> tuple[jax.Array, KVCache, Any, Any]:
    """Fills both caches from the prompts and reads the first new token.

    The drafter's slot t needs the token at t + 1. For all but the last position that is the next prompt token, whatever
    chunk it lies in; the last position's slot waits for the first round, with its state returned here.

    Args:
      target: the model; drafter: a bound drafter, or None to fill the target's cache only.
      prompts: see `Prompts`.
      cache, draft_cache: empty caches of at least P slots.
      chunk: tokens per forward pass.

    Returns:
      (first [B] token, cache, draft_cache, aux [B, 1, A, D] of each prompt's last position); the last two are None
      without a drafter.
    """
    B = prompts.tokens.shape[0]
    capture = drafter.config.capture_layers if drafter is not None else ()
    width = target.config.block.hidden_size
    steps = jnp.arange(chunk)

    def run(carry):
        start, cache, draft_cache, hidden, aux = carry
        window = jax.lax.dynamic_slice_in_dim(prompts.tokens, start, chunk + 1, axis=1)
        positions = jnp.broadcast_to(start + steps, (B, chunk))
        lengths = jnp.full((B,), start)
        out = target(window[:, :-1], positions, cache, lengths, capture=capture, logits=False)
        cache = kv_cache.write(cache, out.kv, lengths, jnp.clip(prompts.lengths - start, 0, chunk))

        last = prompts.lengths - 1 - start  # index of each prompt's last token in this chunk, where it is in it
        here = ((last >= 0) & (last < chunk))[:, None, None]
        index = jnp.clip(last, 0, chunk - 1)[:, None, None]
        hidden = jnp.where(here, jnp.take_along_axis(out.hidden, index, axis=1), hidden)
        if drafter is not None:
            features = drafter.fuse(out.aux)
            drafted = drafter.step(drafter.embed_tokens(window[:, 1:]), features, positions, draft_cache, lengths)
            draft_cache = kv_cache.write(draft_cache, drafted.kv, lengths, jnp.clip(last, 0, chunk))
            picked = jnp.take_along_axis(out.aux, index[..., None], axis=1)
            aux = jnp.where(here[..., None], picked, aux)
        return start + chunk, cache, draft_cache, hidden, aux

    hidden = jnp.zeros((B, 1, width), target.dtype)
    aux = jnp.zeros((B, 1, len(capture), width), target.dtype) if drafter is not None else None
    longest = prompts.lengths.max()
    _, cache, draft_cache, hidden, aux = jax.lax.while_loop(
        lambda carry: carry[0] < longest, run, (jnp.int32(0), cache, draft_cache, hidden, aux)
    )
    first = jnp.argmax(target.logits(hidden[:, 0]), axis=-1).astype(jnp.int32)
    return first, cache, draft_cache, aux


def confirmed_by_prefill(first: jax.Array, aux: jax.Array, block: int) -> Confirmed:
    """The drafter's first `Confirmed`, padded to the size a round leaves: one state per row, followed by `first`."""
    B = first.shape[0]
    tokens = jnp.zeros((B, block), jnp.int32).at[:, 0].set(first)
    return Confirmed(tokens, jnp.pad(aux, ((0, 0), (0, block - 1), (0, 0), (0, 0))), jnp.ones((B,), jnp.int32))
