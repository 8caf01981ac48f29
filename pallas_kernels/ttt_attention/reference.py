"""The op in jnp: the specification, and what runs where no kernel does.

The step-0 part is blockwise softmax attention with its own backward pass (as in FlashAttention, arXiv:2205.14135), so
that neither pass holds more than one block of scores; blocks that no query of theirs sees are skipped. The few keys of
a query's own slot are added through the log-sum-exp of the first part.
"""

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row with nothing to see gives numbers and not NaN


def reference(q, k, v, k_own, v_own, documents, slots, window, block):
    """See `api.ttt_attention` for shapes."""
    B, Q, N, h = q.shape
    K, T, n = k.shape[1], k.shape[2], k_own.shape[2]
    grouped = q.reshape(B, Q, K, N // K, h).transpose(0, 2, 3, 1, 4)  # [B, K, N/K, Q, h]
    last = slots
    first = _first_slot(documents, slots)
    if window is not None:
        first = jnp.maximum(first, slots + n - window + 1)
    block = min(block, max(T, 1))
    padded_q, padded_k = -Q % block, -T % block
    out, lse = _blockwise(
        jnp.pad(grouped, ((0, 0),) * 3 + ((0, padded_q), (0, 0))),
        jnp.pad(k, ((0, 0),) * 2 + ((0, padded_k), (0, 0))),
        jnp.pad(v, ((0, 0),) * 2 + ((0, padded_k), (0, 0))),
        jnp.pad(first, ((0, 0), (0, padded_q)), mode="edge"),
        jnp.pad(last, ((0, 0), (0, padded_q)), mode="edge"),
        block,
    )
    out, lse = out[..., :Q, :], lse[..., :Q]
    if n:
        own = jnp.einsum("bkgqh,bknqh->bkgqn", grouped, k_own.astype(q.dtype), preferred_element_type=jnp.float32)
        own = own * h**-0.5
        if window is not None:  # step j stands at position t + j
            own = jnp.where((jnp.arange(1, n + 1) > n - window)[None, None, None, None, :], own, MASKED)
        total = jnp.logaddexp(lse, jax.nn.logsumexp(own, axis=-1))
        weights = jnp.exp(own - total[..., None])
        out = out * jnp.exp(lse - total)[..., None]
        out = out + jnp.einsum("bkgqn,bknqh->bkgqh", weights, v_own.astype(jnp.float32))
    return out.transpose(0, 3, 1, 2, 4).reshape(B, Q, N, h).astype(q.dtype)


def _first_slot(documents: jax.Array, slots: jax.Array) -> jax.Array:
    """[B, T] documents, [B, Q] slots -> [B, Q] first slot of each slot's document."""
    T = documents.shape[1]
    begins = jnp.concatenate([jnp.ones_like(documents[:, :1], bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(begins, jnp.arange(T)[None, :], 0), axis=1)
    return jnp.take_along_axis(start, slots, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _blockwise(q, k, v, first, last, block):
    """Attention of q [B, K, g, Q, h] to the keys first .. last [B, Q] of k, v [B, K, T, h].

    Returns (out [B, K, g, Q, h] float32, log-sum-exp of the scores [B, K, g, Q] float32). Q and T are multiples of
    `block`.
    """
    return _forward(q, k, v, first, last, block)


def _scores(q, k, first, last, begin):
    """Scores [B, K, g, q, s] float32 of one block of queries and the block of keys from slot `begin`."""
    scores = jnp.einsum("bkgqh,bksh->bkgqs", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
    slot = begin + jnp.arange(k.shape[2])[None, None, :]
    seen = (slot >= first[:, :, None]) & (slot <= last[:, :, None])
    return jnp.where(seen[:, None, None], scores * q.shape[-1] ** -0.5, MASKED)


def _blocks(array: jax.Array, block: int, axis: int) -> jax.Array:
    """Splits an axis into blocks and moves the block index to the front."""
    shape = (*array.shape[:axis], array.shape[axis] // block, block, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def _range(first, last, block):
    """The blocks of keys that any query of a block sees: [low, high)."""
    return first.min() // block, last.max() // block + 1


def _take(array: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, i * block, block, axis=2)


def _forward(q, k, v, first, last, block):
    def one(inputs):
        qi, fi, li = inputs

        def step(j, carry):
            top, total, out = carry
            scores = _scores(qi, _take(k, j, block), fi, li, j * block)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            # Rows that see nothing yet have top == MASKED, and must not count exp(0).
            weights = jnp.where(scores > MASKED / 2, jnp.exp(scores - new_top[..., None]), 0.0)
            scale = jnp.exp(top - new_top)
            part = jnp.einsum("bkgqs,bksh->bkgqh", weights.astype(q.dtype), _take(v, j, block).astype(q.dtype))
            return new_top, total * scale + weights.sum(axis=-1), out * scale[..., None] + part

        low, high = _range(fi, li, block)
        shape = qi.shape[:-1]
        start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(qi.shape, jnp.float32))
        top, total, out = jax.lax.fori_loop(low, high, step, start)
        out = out / jnp.maximum(total, 1e-30)[..., None]
        return out, jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), MASKED)

    out, lse = jax.lax.map(one, (_blocks(q, block, 3), _blocks(first, block, 1), _blocks(last, block, 1)))
    return _joined(out), _joined(lse)


def _joined(blocks: jax.Array) -> jax.Array:
    """[blocks, B, K, g, block, ...] -> [B, K, g, Q, ...]."""
    blocks = jnp.moveaxis(blocks, 0, 3)
    return blocks.reshape(*blocks.shape[:3], -1, *blocks.shape[5:])


def _save(q, k, v, first, last, block):
    out, lse = _forward(q, k, v, first, last, block)
    return (out, lse), (q, k, v, first, last, out, lse)


def _backward(block, saved, gradients):
    q, k, v, first, last, out, lse = saved
    d_out, d_lse = gradients
    # The gradient of score s is p_s (d_out . v_s - d_out . out + d_lse).
    shift = d_lse - (d_out * out).sum(axis=-1)
    scale = q.shape[-1] ** -0.5

    def one(carry, inputs):
        qi, fi, li, d_out_i, lse_i, shift_i = inputs

        def step(j, carry):
            d_q, d_k, d_v = carry
            kj, vj = _take(k, j, block), _take(v, j, block)
            scores = _scores(qi, kj, fi, li, j * block)
            p = jnp.where(scores > MASKED / 2, jnp.exp(scores - lse_i[..., None]), 0.0)
            d_p = jnp.einsum("bkgqh,bksh->bkgqs", d_out_i, vj.astype(jnp.float32))
            d_s = p * (d_p + shift_i[..., None]) * scale
            d_q = d_q + jnp.einsum("bkgqs,bksh->bkgqh", d_s, kj.astype(jnp.float32))
            d_k = _add(d_k, jnp.einsum("bkgqs,bkgqh->bksh", d_s, qi.astype(jnp.float32)), j)
            d_v = _add(d_v, jnp.einsum("bkgqs,bkgqh->bksh", p, d_out_i), j)
            return d_q, d_k, d_v

        low, high = _range(fi, li, block)
        d_q, d_k, d_v = jax.lax.fori_loop(low, high, step, (jnp.zeros(qi.shape, jnp.float32), *carry))
        return (d_k, d_v), d_q

    def _add(total, part, j):
        return jax.lax.dynamic_update_slice_in_dim(total, _take(total, j, block) + part, j * block, axis=2)

    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    per_block = [_blocks(a, block, 3) for a in (d_out, lse, shift)]
    queries = (_blocks(q, block, 3), _blocks(first, block, 1), _blocks(last, block, 1), *per_block)
    (d_k, d_v), d_q = jax.lax.scan(one, zeros, queries)
    return _joined(d_q).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_blockwise.defvjp(_save, _backward)
