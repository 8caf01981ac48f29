"""The distillation losses against their formulas on whole arrays: values, gradients, skipped blocks, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from pallas_kernels.soft_cross_entropy import LOSSES, soft_cross_entropy

B, K, P, H, D, U, V = 2, 3, 13, 6, 5, 11, 17


def random_inputs(seed: int, share: float = 0.6):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    teacher, table = draw(B, P, D), draw(V, D)
    ids = np.sort(rng.choice(V, U, replace=False))
    logits = np.asarray(teacher @ table.T)
    position = {int(id_): i for i, id_ in enumerate(ids)}
    best = np.vectorize(lambda token: position.get(token, -1))(logits.argmax(-1))
    log_mass = np.log(np.exp(logits).sum(-1))
    weights = np.where(rng.random((B, K, P)) < share, rng.random((B, K, P)), 0) * (best >= 0)[:, None]
    floats = (draw(B, K, P, H), draw(U, H))
    return floats, (teacher, table[ids], jnp.asarray(best), jnp.asarray(log_mass), jnp.asarray(weights, jnp.float32))


def whole(student, head, teacher, rows, best, log_mass, weights, *, kind):
    """The formulas with every logit at once, in float64 where it is on."""
    q = jax.nn.softmax(jnp.einsum("bkph,uh->bkpu", student, head), axis=-1)
    logits = jnp.einsum("bpd,ud->bpu", teacher, rows)[:, None]
    p = jax.nn.softmax(logits, axis=-1)
    true_p = jnp.exp(logits - log_mass[:, None, :, None])
    kl = (p * jnp.log(p / q)).sum(-1)
    accepted = jnp.minimum(true_p, q).sum(-1)
    if kind == "kl":
        loss = kl
    elif kind == "ce":
        chosen = jax.nn.one_hot(best, U)[:, None]
        loss = -jnp.log((q * chosen).sum(-1) + (best < 0)[:, None])
    elif kind == "lk-alpha":
        loss = -jnp.log(accepted)
    else:
        share = jnp.exp(-3.0 * jax.lax.stop_gradient(accepted))
        loss = share * kl + (1 - share) * (1 - accepted)
    hit = (q.argmax(-1) == best[:, None]) & (weights != 0)
    loss = jnp.where(weights != 0, loss, 0)
    return (loss * weights).sum(), loss, hit


@functools.cache
def compiled(kind: str, block: int):
    def with_gradients(function):
        def total(floats, constants):
            total, loss, hit = function(*floats, *constants)
            return total, (loss, hit)

        return jax.jit(jax.value_and_grad(total, has_aux=True))

    ours = functools.partial(soft_cross_entropy, kind=kind, block=block)
    return with_gradients(ours), with_gradients(functools.partial(whole, kind=kind))


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("kind", LOSSES)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.0, 0.1, 0.6, 1.0]))
def test_values_and_gradients_equal_the_formulas(kind, block, seed, share):
    floats, constants = random_inputs(seed, share)
    found, wanted = (function(floats, constants) for function in compiled(kind, block))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_equal_finite_differences(kind):
    floats, constants = random_inputs(0)

    def total(*floats):
        return soft_cross_entropy(*floats, *constants, kind=kind, block=8).total

    # lk-lambda's mixing share is held constant by its gradient and not by a difference.
    if kind != "lk-lambda":
        check_grads(total, floats, order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


def test_nothing_that_counts_gives_zeros():
    floats, constants = random_inputs(0, share=0.0)
    (total, (loss, hit)), gradients = compiled("kl", 4)[0](floats, constants)
    assert total == 0 and not loss.any() and not hit.any()
    assert not any(np.any(g) for g in gradients)


def test_a_perfect_student_has_no_loss_and_always_hits():
    _, (teacher, rows, best, log_mass, weights) = random_inputs(1)
    student = jnp.broadcast_to(teacher[:, None], (B, K, P, D))
    _, loss, hit = soft_cross_entropy(student, rows, teacher, rows, best, log_mass, weights)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    assert np.array_equal(hit, weights != 0)


def test_no_array_of_all_logits_is_held():
    """Temporaries stay below positions times vocabulary, and weightless blocks are skipped by a branch."""
    positions, vocab = 2048, 4096
    zeros = jnp.zeros
    inputs = (
        zeros((1, 2, positions, 8)), zeros((vocab, 8)), zeros((1, positions, 8)), zeros((vocab, 8)),
        zeros((1, positions), jnp.int32), zeros((1, positions)), zeros((1, 2, positions)),
    )  # fmt: skip
    step = jax.jit(jax.grad(lambda *a: soft_cross_entropy(*a, block=64).total, argnums=(0, 1)))
    compiled = step.lower(*inputs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < positions * vocab * 4 / 2
    assert "conditional" in compiled.as_text()


@pytest.mark.parametrize("name", ["head", "teacher", "best", "log_mass", "weights"])
def test_wrong_shapes_are_named(name):
    floats, constants = random_inputs(0)
    names = ["student", "head", "teacher", "rows", "best", "log_mass", "weights"]
    inputs = dict(zip(names, (*floats, *constants), strict=True))
    inputs[name] = inputs[name][:, :-1]
    with pytest.raises(ValueError, match=f"soft_cross_entropy: {name} is"):
        soft_cross_entropy(**inputs)
    with pytest.raises(ValueError, match="unknown loss 'mse'"):
        soft_cross_entropy(*floats, *constants, kind="mse")
