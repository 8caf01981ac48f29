"""What a verified block leaves behind: emitted tokens, kept cache entries, states for the drafter's next extend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.layers import cache as kv_cache
from eagle_jax.records import Confirmed, KVCache, TargetOutput, VerifyResult, record


@record
class Limits:
    """Where each row ends.

    max_new_tokens: [B].
    eos_token_ids: [E]; unused entries are -1, which no token equals.
    """

    max_new_tokens: jax.Array
    eos_token_ids: jax.Array


@record
class Emitted:
    """Tokens given out so far.

    tokens: [B, N]; count: [B] how many are valid; done: [B] bool.
    """

    tokens: jax.Array
    count: jax.Array
    done: jax.Array


def emit(emitted: Emitted, tokens: jax.Array, count: jax.Array, limits: Limits) -> tuple[Emitted, jax.Array]:
    """Appends a block and ends rows at their first end token or at their length limit, inside the block.

    Args:
      emitted: so far; rows that are done take nothing.
      tokens: [B, P]; count: [B] valid ones.
      limits: where rows end.

    Returns:
      (emitted, kept): kept [B] is how many tokens of the block were taken.
    """
    steps = jnp.arange(tokens.shape[1])[None, :]
    room = limits.max_new_tokens - emitted.count
    count = jnp.where(emitted.done, 0, jnp.minimum(count, room))
    is_end = (tokens[:, :, None] == limits.eos_token_ids[None, None, :]).any(axis=2) & (steps < count[:, None])
    ends = is_end.any(axis=1)
    kept = jnp.where(ends, jnp.argmax(is_end, axis=1).astype(jnp.int32) + 1, count)
    slots = jnp.where(steps < kept[:, None], emitted.count[:, None] + steps, emitted.tokens.shape[1])
    write_row = jax.vmap(lambda row, block, slots: row.at[slots].set(block, mode="drop"))
    total = emitted.count + kept
    return Emitted(
        tokens=write_row(emitted.tokens, tokens, slots),
        count=total,
        done=emitted.done | ends | (total >= limits.max_new_tokens),
    ), kept


def commit(
    output: TargetOutput, verdict: VerifyResult, kept: jax.Array, cache: KVCache, length: jax.Array
) -> tuple[KVCache, Confirmed]:
    """Keeps the first `kept` nodes of the accepted path: entries in the target's cache, states for the drafter.

    Args:
      output: the target's pass over the tree's nodes.
      verdict: the accepted path.
      kept: [B] nodes to keep, 0 for rows that have ended.
      cache: the target's cache, valid up to `length`.
      length: [B].
    """
    cache = kv_cache.write(cache, kv_cache.take_path(output.kv, verdict.path), length, kept)
    assert output.aux is not None
    aux = jnp.take_along_axis(output.aux, verdict.path[:, :, None, None], axis=1)
    return cache, Confirmed(verdict.tokens, aux, kept)
