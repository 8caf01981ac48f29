"""Training-time test against drafting: every slot at every step is a draft from its own prefix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from eagle_jax.layers import cache as kv_cache
from eagle_jax.records import NewKV
from eagle_jax.trainer.batch import Batch
from eagle_jax.trainer.ttt import by_teacher, unroll

STEPS = 7
LENGTHS = (9, 14)  # two packed documents, then padding
T = 26

VARIANTS = {
    "eagle3, norms": {"fc_norm": False, "norm_output": False, "norm_before_fc": True, "norm_before_residual": True},
    "eagle3_1, own tables": {"own_head": True, "own_embedding": True, "draft_vocab_size": 16},
    "two blocks, q/k norm, window": {"num_layers": 2, "block": {"qk_norm": True, "sliding_window": 4}},
}


def packed_batch(rng, lengths=LENGTHS, T=T) -> Batch:
    documents, positions = np.zeros(T, np.int32), np.zeros(T, np.int32)
    begin = 0
    for number, length in enumerate(lengths, start=1):
        documents[begin : begin + length] = number
        positions[begin : begin + length] = np.arange(length)
        begin += length
    tokens = rng.integers(3, tiny.VOCAB, T).astype(np.int32)
    mask = np.ones(T, bool)
    return Batch(*(jnp.asarray(a)[None] for a in (tokens, mask, documents, positions)))


def drafts(drafter, aux: jax.Array, tokens: np.ndarray) -> np.ndarray:
    """Drafts from every prefix of one document with the decoder's own cache: [K, t, U] logits, NaN without tokens."""
    n, block = len(tokens) - 1, drafter.config.block
    slots = np.arange(n)

    def empty(rows: int):
        return kv_cache.init(
            drafter.config.num_layers, rows, block.num_kv_heads, n + STEPS, block.head_dim, jnp.float32
        )

    @jax.jit
    def step(embedded, state, positions, cache, lengths):
        out = drafter.step(drafter.embed_tokens(embedded), state, positions, cache, lengths)
        return out, drafter.logits(out.output)

    features = drafter.fuse(aux[None, :n])
    out, logits = step(tokens[None, 1:], features, slots[None], empty(1), jnp.zeros(1, jnp.int32))
    result = np.full((STEPS, n, drafter.config.draft_vocab_size), np.nan, np.float32)
    result[0] = logits[0]
    shared = NewKV(*(jnp.repeat(x, n, axis=1) for x in (out.kv.k, out.kv.v)))
    cache = kv_cache.write(empty(n), shared, jnp.zeros(n, jnp.int32), slots + 1)
    state = out.feedback[0][:, None]
    for k in range(1, STEPS):
        following = np.append(tokens[1:], np.zeros(STEPS, np.int32))[slots + k]
        out, logits = step(following[:, None], state, (slots + k)[:, None], cache, jnp.asarray(slots + k))
        cache = kv_cache.write(cache, out.kv, jnp.asarray(slots + k), jnp.ones(n, jnp.int32))
        result[k, : n - k] = logits[: n - k, 0]
        state = out.feedback
    return result


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_slot_is_a_draft_from_its_own_prefix(variant):
    rng = np.random.default_rng(0)
    target = tiny.target()
    drafter = tiny.drafter(target, **VARIANTS[variant])
    batch = packed_batch(rng)
    aux = jnp.asarray(rng.standard_normal((1, T, 3, target.config.block.hidden_size)), jnp.float32)
    outputs, _ = jax.jit(lambda aux, batch: unroll(drafter, aux, batch, STEPS))(aux, batch)
    logits = np.asarray(drafter.logits(outputs))[0]  # [K, T, U]

    begin = 0
    for length in LENGTHS:
        expected = drafts(drafter, aux[0, begin : begin + length], np.asarray(batch.tokens)[0, begin : begin + length])
        found = logits[:, begin : begin + length - 1]
        there = ~np.isnan(expected)
        assert there[:, :, 0].sum() == sum(max(length - 1 - k, 0) for k in range(STEPS))
        np.testing.assert_allclose(found[there], expected[there], atol=1e-5 * np.abs(expected[there]).max())
        begin += length


def test_packed_documents_equal_rows_of_their_own():
    """Also gradients: nothing of one document reaches the other, at any depth."""
    rng = np.random.default_rng(1)
    target = tiny.target()
    drafter = tiny.drafter(target)
    batch = packed_batch(rng)
    aux = jnp.asarray(rng.standard_normal((1, T, 3, target.config.block.hidden_size)), jnp.float32)
    second = slice(LENGTHS[0], sum(LENGTHS))

    @jax.jit
    def of_second(aux):
        outputs, _ = unroll(drafter, aux, batch, STEPS)
        return jnp.square(outputs[:, :, second.start : second.stop - STEPS]).sum()

    gradient = jax.grad(of_second)(aux)
    assert not np.any(gradient[:, : second.start]) and np.any(gradient[:, second])


def test_recomputing_changes_nothing():
    """Loss and gradients with and without rematerialisation (B97)."""
    rng = np.random.default_rng(2)
    target = tiny.target()
    drafter = tiny.drafter(target, own_head=True, draft_vocab_size=16)
    batch = packed_batch(rng)
    aux = jnp.asarray(rng.standard_normal((1, T, 3, target.config.block.hidden_size)), jnp.float32)
    graph, parameters, rest = nnx.split(drafter, nnx.Param, ...)

    def gradients(remat: bool):
        def loss(parameters):
            outputs, _ = unroll(nnx.merge(graph, parameters, rest), aux, batch, 3, remat=remat)
            return jnp.square(outputs).sum()

        return jax.jit(jax.value_and_grad(loss))(parameters)

    kept, recomputed = (jax.tree.leaves(gradients(remat)) for remat in (False, True))
    largest = max(np.abs(leaf).max() for leaf in kept)
    for a, b in zip(kept, recomputed, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * largest)


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_size_of_what_is_fed_on_is_watched(norm_output):
    """1 with the norm (unit weights), not without (B35)."""
    rng = np.random.default_rng(3)
    target = tiny.target()
    drafter = tiny.drafter(target, norm_output=norm_output)
    aux = jnp.asarray(rng.standard_normal((1, T, 3, target.config.block.hidden_size)), jnp.float32)
    _, sizes = jax.jit(lambda aux, batch: unroll(drafter, aux, batch, 4))(aux, packed_batch(rng))
    assert np.allclose(sizes, 1, atol=1e-3) == norm_output


def test_outputs_move_to_the_position_of_their_teacher():
    outputs = jnp.arange(2 * 3 * 5, dtype=jnp.float32).reshape(1, 2 * 3, 5, 1)[:, :3]
    moved = by_teacher(outputs)
    for k in range(3):
        for s in range(5):
            expected = outputs[0, k, s - 1 - k, 0] if s - 1 - k >= 0 else 0
            assert moved[0, k, s, 0] == expected


def test_step_by_step_settings_do_not_change_the_earlier_steps():
    """Any number of steps from one rule (B84): a shorter unroll is the beginning of a longer one."""
    rng = np.random.default_rng(4)
    target = tiny.target()
    drafter = tiny.drafter(target)
    aux = jnp.asarray(rng.standard_normal((1, T, 3, target.config.block.hidden_size)), jnp.float32)
    batch = packed_batch(rng)

    def outputs(steps: int) -> jax.Array:
        return jax.jit(lambda aux, batch: unroll(drafter, aux, batch, steps)[0])(aux, batch)

    long = outputs(8)
    for steps in (1, 5):
        short = outputs(steps)
        np.testing.assert_allclose(short, long[:, :steps], atol=1e-5)
