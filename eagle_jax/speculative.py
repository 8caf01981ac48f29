"""Speculative decoding on the device: one state record, one pure round, one while_loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.prefill import Prompts, confirmed_by_prefill, prefill
from eagle_jax.proposal.chain import propose
from eagle_jax.records import Confirmed, KVCache, record
from eagle_jax.verifier.accept import accept_greedy
from eagle_jax.verifier.commit import Emitted, Limits, commit, emit


@record
class SpeculativeState:
    """Everything between two rounds.

    emitted: tokens given out.
    root: [B] the last emitted token; it is at position `length` and in no cache yet.
    length: [B] positions in the target's cache.
    cache, draft_cache: committed keys and values.
    confirmed: target states that the drafter has not seen yet.
    rounds: [B] verifications that emitted tokens.
    accepted: [B, G] rounds whose k-th draft token was emitted.
    cut: [B, G] rounds whose k-th draft token was accepted but lies behind the row's end.
    """

    emitted: Emitted
    root: jax.Array
    length: jax.Array
    cache: KVCache
    draft_cache: KVCache
    confirmed: Confirmed
    rounds: jax.Array
    accepted: jax.Array
    cut: jax.Array


def start(
    target,
    drafter,
    prompts: Prompts,
    limits: Limits,
    cache: KVCache,
    draft_cache: KVCache,
    *,
    output,
    G: int,
    chunk: int,
) -> SpeculativeState:
    """Prefill: both caches hold the prompts, the first token of each row is emitted.

    Args:
      output: [B, N] zeros, room for the emitted tokens.
      G: draft tokens per round.
      chunk: prompt tokens per forward pass.
    """
    B = prompts.lengths.shape[0]
    first, cache, draft_cache, aux = prefill(target, drafter, prompts, cache, draft_cache, chunk)
    none_yet = jnp.zeros((B,), jnp.int32)
    emitted = Emitted(output, none_yet, limits.max_new_tokens <= 0)
    emitted, _ = emit(emitted, first[:, None], jnp.ones((B,), jnp.int32), limits)
    counts = jnp.zeros((B, G), jnp.int32)
    return SpeculativeState(
        emitted=emitted,
        root=first,
        length=prompts.lengths,
        cache=cache,
        draft_cache=draft_cache,
        confirmed=confirmed_by_prefill(first, aux, G + 1),
        rounds=none_yet,
        accepted=counts,
        cut=counts,
    )


def decode_round(target, drafter, state: SpeculativeState, limits: Limits, G: int) -> SpeculativeState:
    """Extend, draft G tokens, verify them in one target pass, accept, commit. Rows that have ended do not change."""
    length = state.length
    tree, draft_cache = propose(drafter, state.confirmed, state.draft_cache, length, state.root, G)
    output = target(
        tree.tokens,
        length[:, None] + tree.depth,
        state.cache,
        length,
        self_mask=tree.ancestors,
        capture=drafter.config.capture_layers,
    )
    verdict = accept_greedy(tree, output.logits, max_depth=G)
    emitted, kept = emit(state.emitted, verdict.tokens, verdict.count, limits)
    cache, confirmed = commit(output, verdict, kept, state.cache, length)

    running = kept > 0
    last = jnp.maximum(kept - 1, 0)[:, None]
    k = jnp.arange(G)[None, :]
    was_accepted = (k < verdict.count[:, None] - 1) & running[:, None]
    # Draft token k is emitted token k of the block: the block's last kept token is the target's own, unless an end or
    # the limit cut the block short, and then it is a draft token.
    was_emitted = was_accepted & (k < kept[:, None])
    return SpeculativeState(
        emitted=emitted,
        root=jnp.where(running, jnp.take_along_axis(verdict.tokens, last, axis=1)[:, 0], state.root),
        length=length + kept,
        cache=cache,
        draft_cache=draft_cache,
        confirmed=confirmed,
        rounds=state.rounds + running,
        accepted=state.accepted + was_emitted,
        cut=state.cut + (was_accepted & ~was_emitted),
    )


def run(target, drafter, state: SpeculativeState, limits: Limits, G: int, max_rounds: jax.Array) -> SpeculativeState:
    """Rounds until every row has ended, or `max_rounds` have run."""

    def going(carry):
        state, done_rounds = carry
        return (done_rounds < max_rounds) & ~state.emitted.done.all()

    def body(carry):
        state, done_rounds = carry
        return decode_round(target, drafter, state, limits, G), done_rounds + 1

    return jax.lax.while_loop(going, body, (state, jnp.int32(0)))[0]
