"""Plain decoding on the device, one token per target pass: the oracle for speculation, and its baseline."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from eagle_jax.layers import cache as kv_cache
from eagle_jax.prefill import Prompts, prefill
from eagle_jax.records import KVCache, record
from eagle_jax.verifier.commit import Emitted, Limits, emit

# (logits [B, V], positions [B] of the tokens to come) -> tokens [B] int32.
Choose = Callable[[jax.Array, jax.Array], jax.Array]


@record
class PlainState:
    """emitted: tokens given out; last: [B] the newest, at position `length` [B] and not in the cache yet."""

    emitted: Emitted
    last: jax.Array
    length: jax.Array
    cache: KVCache


def start(target, prompts: Prompts, limits: Limits, cache: KVCache, *, output: jax.Array, chunk: int) -> PlainState:
    """Prefill: the cache holds the prompts, the first token of each row is emitted. See `speculative.start`."""
    B = prompts.lengths.shape[0]
    first, cache, _, _ = prefill(target, None, prompts, cache, None, chunk)
    emitted = Emitted(output, jnp.zeros((B,), jnp.int32), limits.max_new_tokens <= 0)
    emitted, _ = emit(emitted, first[:, None], jnp.ones((B,), jnp.int32), limits)
    return PlainState(emitted, first, prompts.lengths, cache)


def greedy(logits: jax.Array, positions: jax.Array) -> jax.Array:
    """[B] most likely tokens."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def decode_step(target, state: PlainState, limits: Limits, choose: Choose = greedy) -> PlainState:
    """One target pass over the newest token of each row."""
    out = target(state.last[:, None], state.length[:, None], state.cache, state.length)
    tokens = choose(out.logits[:, 0], state.length + 1)
    emitted, kept = emit(state.emitted, tokens[:, None], jnp.ones_like(state.length), limits)
    return PlainState(
        emitted=emitted,
        last=jnp.where(kept > 0, tokens, state.last),
        length=state.length + kept,
        cache=kv_cache.write(state.cache, out.kv, state.length, kept),
    )


def run(target, state: PlainState, limits: Limits, max_steps: jax.Array, choose: Choose = greedy) -> PlainState:
    """Steps until every row has ended, or `max_steps` have run."""

    def going(carry):
        state, done_steps = carry
        return (done_steps < max_steps) & ~state.emitted.done.all()

    def body(carry):
        state, done_steps = carry
        return decode_step(target, state, limits, choose), done_steps + 1

    return jax.lax.while_loop(going, body, (state, jnp.int32(0)))[0]
