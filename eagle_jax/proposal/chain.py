"""Greedy chain drafting: extend the drafter over what the target has just confirmed, then guess G tokens in a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.layers import cache as kv_cache
from eagle_jax.records import Confirmed, DraftTree, KVCache


def extend(drafter, confirmed: Confirmed, cache: KVCache, length: jax.Array) -> tuple[jax.Array, jax.Array, KVCache]:
    """Writes the drafter's entries for confirmed positions, from the target's own states.

    Args:
      drafter: a bound drafter.
      confirmed: the states of positions length - count .. length - 1, each with the token that follows it.
      cache: the drafter's cache, valid up to length - count; what it holds beyond came from guesses and is replaced.
      length: [B] confirmed positions.

    Returns:
      (output, feedback, cache): the normed state and the state to feed back at the last confirmed slot, [B, 1, H] each.
    """
    start = length - confirmed.count
    steps = jnp.arange(confirmed.tokens.shape[1])
    out = drafter.step(
        drafter.embed_tokens(confirmed.tokens),
        drafter.fuse(confirmed.aux),
        start[:, None] + steps[None, :],
        cache,
        start,
    )
    cache = kv_cache.write(cache, out.kv, start, confirmed.count)
    last = jnp.maximum(confirmed.count - 1, 0)[:, None, None]  # 0 only in rows that have ended
    output, feedback = (jnp.take_along_axis(states, last, axis=1) for states in (out.output, out.feedback))
    return output, feedback, cache


def propose(
    drafter, confirmed: Confirmed, cache: KVCache, length: jax.Array, root: jax.Array, num_draft_tokens: int
) -> tuple[DraftTree, KVCache]:
    """Guesses the G tokens after `root`.

    Args:
      confirmed, cache, length: see `extend`.
      root: [B] the last emitted token, at position `length`.
      num_draft_tokens: G >= 1.

    Returns:
      The chain, and the drafter's cache: valid up to `length`, with guesses behind it that the next `extend` replaces.
    """
    output, feedback, cache = extend(drafter, confirmed, cache, length)

    def guess(output: jax.Array) -> jax.Array:  # [B, 1, H] -> [B, 1]
        return drafter.to_target(jnp.argmax(drafter.logits(output), axis=-1).astype(jnp.int32))

    def step(carry, k):
        token, feedback, cache = carry
        slot = length + k
        out = drafter.step(drafter.embed_tokens(token), feedback, slot[:, None], cache, slot)
        cache = kv_cache.write(cache, out.kv, slot, jnp.ones_like(slot))
        token = guess(out.output)
        return (token, out.feedback, cache), token[:, 0]

    first = guess(output)
    (_, _, cache), rest = jax.lax.scan(step, (first, feedback, cache), jnp.arange(num_draft_tokens - 1))
    return chain(jnp.concatenate([root[:, None], first, rest.T], axis=1)), cache


def chain(tokens: jax.Array) -> DraftTree:
    """[B, M] tokens, the root first -> the tree with one branch."""
    B, M = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(M), (B, M))
    return DraftTree(tokens, depth, jnp.broadcast_to(jnp.tril(jnp.ones((M, M), bool)), (B, M, M)))
