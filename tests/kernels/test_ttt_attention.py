"""TTT attention against a dense softmax over every key: values, gradients, skipped blocks, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.ttt_attention import ttt_attention


def dense(q, k, v, k_own, v_own, documents, slots, window):
    """The definition: one mask over all T + n keys of a query."""
    B, Q, N, h = q.shape
    K, T, n = k.shape[1], k.shape[2], k_own.shape[2]
    q = q.reshape(B, Q, K, N // K, h)
    key_slot = jnp.arange(T)[None, None, :]
    seen = (key_slot <= slots[:, :, None]) & (
        documents[:, None, :] == jnp.take_along_axis(documents, slots, axis=1)[:, :, None]
    )
    own_seen = jnp.ones((B, Q, n), bool)
    seen &= key_slot > slots[:, :, None] + n - window
    own_seen = own_seen & (jnp.arange(1, n + 1) > n - window)[None, None, :]
    scores = jnp.concatenate(
        [jnp.einsum("bqkgh,bksh->bkgqs", q, k), jnp.einsum("bqkgh,bknqh->bkgqn", q, k_own)], axis=-1
    ) / np.sqrt(h)
    mask = jnp.concatenate([seen, own_seen], axis=-1)[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    out = jnp.einsum("bkgqs,bksh->bqkgh", weights[..., :T], v)
    out = out + jnp.einsum("bkgqn,bknqh->bqkgh", weights[..., T:], v_own)
    return out.reshape(B, Q, N, h)


def ours(q, k, v, k_own, v_own, documents, slots, window=None, block=16):
    return ttt_attention(q, k, v, documents, own=(k_own, v_own), slots=slots, window=window, block=block)


def random_inputs(seed, B=2, T=37, Q=None, N=4, K=2, h=8, n=2, runs=3):
    rng = np.random.default_rng(seed)
    Q = T if Q is None else Q

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    documents = np.sort(rng.integers(0, runs, (B, T)), axis=1)
    slots = np.stack([np.sort(rng.choice(T, Q, replace=False)) for _ in range(B)])
    return (
        draw(B, Q, N, h),
        draw(B, K, T, h),
        draw(B, K, T, h),
        draw(B, K, n, Q, h),
        draw(B, K, n, Q, h),
        jnp.asarray(documents),
        jnp.asarray(slots),
    )


SHAPES = [  # slots, queries, query heads per key head, later steps, block
    (1, 1, 1, 0, 16),
    (37, 37, 1, 0, 16),
    (40, 17, 3, 2, 8),
    (23, 23, 2, 3, 64),
]
FAR = 1 << 20  # a window that excludes nothing


@functools.cache
def compiled(n: int, block: int):
    """Values and gradients of both, as functions of (inputs, weight, window)."""

    def loss(function):
        def total(floats, documents, slots, weight, window):
            return (function(*floats, documents, slots, window) * weight).sum()

        return jax.jit(jax.value_and_grad(total))

    return loss(functools.partial(ours, block=block)), loss(dense)


@pytest.mark.parametrize("T, Q, groups, n, block", SHAPES)
@given(seed=st.integers(0, 2**31), runs=st.integers(1, 5), window=st.just(FAR) | st.integers(1, 50))
def test_values_and_gradients_equal_dense_attention(T, Q, groups, n, block, seed, runs, window):
    inputs = random_inputs(seed, T=T, Q=Q, N=2 * groups, n=n, runs=runs)
    weight = jnp.asarray(np.random.default_rng(seed).standard_normal(inputs[0].shape), jnp.float32)
    found, wanted = (f(inputs[:5], *inputs[5:], weight, jnp.int32(window)) for f in compiled(n, block))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4)


def test_documents_never_leak():
    q, k, v, k_own, v_own, _, slots = random_inputs(0, T=24)
    documents = jnp.asarray(np.repeat([[1, 2, 3]], 8, axis=1).repeat(2, axis=0))
    before = ours(q, k, v, k_own, v_own, documents, slots, block=8)
    disturbed = ours(q, k.at[:, :, :8].add(5.0), v.at[:, :, :8].add(5.0), k_own, v_own, documents, slots, block=8)
    assert np.array_equal(before[:, 8:], disturbed[:, 8:])
    assert not np.allclose(before[:, :8], disturbed[:, :8])


def test_bfloat16_stays_near_float32():
    inputs = random_inputs(3, T=64)
    exact = ours(*inputs)
    rounded = ours(*(x.astype(jnp.bfloat16) for x in inputs[:5]), *inputs[5:])
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.05)


def test_memory_is_linear_in_the_slots():
    """A doubled sequence takes about twice the temporaries, and never a T x T array."""

    def temporaries(T: int) -> int:
        inputs = random_inputs(0, B=1, T=T, N=2, K=1, n=1)
        step = jax.grad(lambda *floats: ours(*floats, *inputs[5:], block=64).sum(), argnums=range(5))
        return jax.jit(step).lower(*inputs[:5]).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(1024), temporaries(2048)
    assert large < 2.2 * small
    assert large < 2048 * 2048 * 4


@pytest.mark.parametrize(
    "name, change",
    [
        ("k", lambda a: a[..., :-1]),
        ("v_own", lambda a: a[:, :, :1]),
        ("documents", lambda a: a[:1]),
        ("slots", lambda a: a[:, :-1]),
    ],
)
def test_wrong_shapes_are_named(name, change):
    names = ["q", "k", "v", "k_own", "v_own", "documents", "slots"]
    inputs = dict(zip(names, random_inputs(0), strict=True))
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=f"ttt_attention: {name} is"):
        ours(*inputs.values())


def test_step_0_is_causal_attention_over_every_slot():
    q, k, v, k_own, v_own, documents, slots = random_inputs(0, n=0)
    assert np.array_equal(ttt_attention(q, k, v, documents, block=16), ours(q, k, v, k_own, v_own, documents, slots))
