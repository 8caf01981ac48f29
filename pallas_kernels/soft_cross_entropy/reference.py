"""The op in jnp: the specification, and what runs where no kernel does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

LK_ETA = 3.0  # how fast "lk-lambda" moves from KL to total variation; the value TorchSpec and NeMo Automodel use

# A loss: (log q [..., U] of the student, teacher logits [..., U], best [...] or -1, log mass [...]) -> [...].
Loss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _kl(log_q: jax.Array, logits: jax.Array, best: jax.Array, log_mass: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def _cross_entropy(log_q: jax.Array, logits: jax.Array, best: jax.Array, log_mass: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(log_q, jnp.maximum(best, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(best >= 0, -picked, 0.0)


def _acceptance(log_q: jax.Array, logits: jax.Array, log_mass: jax.Array) -> jax.Array:
    """sum(min(p, q)) with p the teacher's true probabilities: the chance that a draft drawn from q is accepted."""
    return jnp.minimum(jnp.exp(logits - log_mass[..., None]), jnp.exp(log_q)).sum(axis=-1)


def _lk_alpha(log_q: jax.Array, logits: jax.Array, best: jax.Array, log_mass: jax.Array) -> jax.Array:
    return -jnp.log(jnp.maximum(_acceptance(log_q, logits, log_mass), 1e-20))


def _lk_lambda(log_q: jax.Array, logits: jax.Array, best: jax.Array, log_mass: jax.Array) -> jax.Array:
    accepted = _acceptance(log_q, logits, log_mass)
    share = jnp.exp(-LK_ETA * jax.lax.stop_gradient(accepted))
    return share * _kl(log_q, logits, best, log_mass) + (1 - share) * (1 - accepted)


LOSSES: dict[str, Loss] = {"kl": _kl, "ce": _cross_entropy, "lk-alpha": _lk_alpha, "lk-lambda": _lk_lambda}


def reference(student, head, teacher, rows, best, log_mass, weights, kind, block):
    """See `api.soft_cross_entropy` for shapes. Returns (total, loss, hit)."""
    P = student.shape[2]
    # Positions that count come first, so that whole blocks without any can be skipped.
    order = jnp.argsort(~(weights != 0).any(axis=1), axis=1, stable=True)  # [B, P]
    padding = -P % block

    def packed(array: jax.Array, axis: int) -> jax.Array:
        index = jnp.expand_dims(order, tuple(i for i in range(array.ndim) if i not in (0, axis)))
        array = jnp.take_along_axis(array, index, axis=axis)
        return jnp.pad(array, [(0, padding if i == axis else 0) for i in range(array.ndim)])

    total, loss, hit = _packed_losses(
        packed(student, 2), head, packed(teacher, 1), rows, packed(best, 1), packed(log_mass, 1), packed(weights, 2),
        kind, block,
    )  # fmt: skip

    back = jnp.argsort(order, axis=1)[:, None, :]
    loss, hit = (jnp.take_along_axis(array[..., :P], back, axis=2) for array in (loss, hit))
    return total, loss, hit


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _packed_losses(student, head, teacher, rows, best, log_mass, weights, kind, block):
    total, loss, hit, *_ = _pass(student, head, teacher, rows, best, log_mass, weights, kind, block, gradients=False)
    return total, loss, hit


def _blocks(array: jax.Array, block: int, axis: int) -> jax.Array:
    shape = (*array.shape[:axis], array.shape[axis] // block, block, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def _joined(blocks: jax.Array) -> jax.Array:
    """[blocks, B, K, block, ...] -> [B, K, P, ...]."""
    blocks = jnp.moveaxis(blocks, 0, 2)
    return blocks.reshape(*blocks.shape[:2], -1, *blocks.shape[4:])


def _pass(student, head, teacher, rows, best, log_mass, weights, kind, block, gradients):
    """One pass over the blocks; with `gradients`, also those of the total for student and head."""

    def losses_of(z, inputs):  # z: [B, K, b, U] float32 student logits
        _, state, best, log_mass, weights = inputs
        logits = jnp.einsum("bpd,ud->bpu", state, rows, preferred_element_type=jnp.float32)
        loss = LOSSES[kind](jax.nn.log_softmax(z, axis=-1), logits[:, None], best[:, None], log_mass[:, None])
        loss = jnp.where(weights != 0, loss, 0.0)
        return (loss * weights).sum(), loss

    def compute(d_head, inputs):
        states, _, best, _, weights = inputs
        z = jnp.einsum("bkph,uh->bkpu", states, head, preferred_element_type=jnp.float32)
        hit = (jnp.argmax(z, axis=-1) == best[:, None]) & (weights != 0)
        if not gradients:
            total, loss = losses_of(z, inputs)
            return d_head, (total, loss, hit, None)
        (total, loss), d_z = jax.value_and_grad(losses_of, has_aux=True)(z, inputs)
        d_z = d_z.astype(student.dtype)
        d_states = jnp.einsum("bkpu,uh->bkph", d_z, head)
        d_head = d_head + jnp.einsum("bkpu,bkph->uh", d_z, states, preferred_element_type=jnp.float32)
        return d_head, (total, loss, hit, d_states)

    def skip(d_head, inputs):
        states, *_, weights = inputs
        nothing = jnp.zeros(weights.shape, jnp.float32)
        d_states = jnp.zeros_like(states) if gradients else None
        return d_head, (jnp.float32(0), nothing, nothing.astype(bool), d_states)

    def step(d_head, inputs):
        return jax.lax.cond((inputs[-1] != 0).any(), compute, skip, d_head, inputs)

    axes = ((student, 2), (teacher, 1), (best, 1), (log_mass, 1), (weights, 2))
    d_head = jnp.zeros(head.shape if gradients else (), jnp.float32)
    d_head, (totals, loss, hit, d_student) = jax.lax.scan(
        step, d_head, tuple(_blocks(array, block, axis) for array, axis in axes)
    )
    d_student = _joined(d_student) if gradients else None
    return totals.sum(), _joined(loss), _joined(hit), d_student, d_head


def _save(student, head, teacher, rows, best, log_mass, weights, kind, block):
    total, loss, hit, d_student, d_head = _pass(
        student, head, teacher, rows, best, log_mass, weights, kind, block, gradients=True
    )
    return (total, loss, hit), (d_student, d_head.astype(head.dtype))


def _scaled(kind, block, saved, cotangents):
    d_student, d_head = saved
    factor = cotangents[0]
    return (factor * d_student).astype(d_student.dtype), (factor * d_head).astype(d_head.dtype), *(None,) * 5


_packed_losses.defvjp(_save, _scaled)
