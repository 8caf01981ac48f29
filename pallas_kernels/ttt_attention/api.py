"""The public function of the op: checks shapes, then runs the blockwise reference (XLA compiles it everywhere)."""

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_attention.reference import reference


def ttt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: jax.Array,
    *,
    own: tuple[jax.Array, jax.Array] | None = None,
    slots: jax.Array | None = None,
    window: jax.Array | int | None = None,
    block: int = 256,
) -> jax.Array:
    """Training-time test attention (EAGLE-3, arXiv:2503.01840): one softmax over two kinds of keys.

    At TTT step n the query of slot t sees the step-0 keys of its document up to slot t, and its own slot's keys of the
    steps 1 .. n; it stands at position t + n. With n = 0 this is causal attention within documents. Memory is linear in
    the number of slots: neither T x T scores nor a T x T mask is ever held.

    Args:
      q: [B, Q, N, h] rotated queries of step n.
      k, v: [B, K, T, h] rotated keys, and values, of step 0; N is a multiple of K.
      documents: [B, T] document of each slot; the slots of a document are adjacent. Queries see their own only.
      own: keys and values of the queries' own slots at steps 1 .. n, each [B, K, n, Q, h]; None at step 0.
      slots: [B, Q] slot of each query, in [0, T), ascending; None is every slot.
      window: a query at position p sees positions above p - window only; None sees all.
      block: queries, and keys, per block.

    Returns:
      [B, Q, N, h] in q's dtype; the softmax is float32.

    Raises:
      ValueError: shapes that do not fit together.
    """
    B, Q, N, h = q.shape
    K, T = k.shape[1], k.shape[2]
    if slots is None:
        slots = jnp.broadcast_to(jnp.arange(Q), (B, Q))
    if own is None:
        own = (jnp.zeros((B, K, 0, Q, h), k.dtype),) * 2
    k_own, v_own = own
    n = k_own.shape[2]
    expected = {
        "k": (k, (B, K, T, h)),
        "v": (v, (B, K, T, h)),
        "k_own": (k_own, (B, K, n, Q, h)),
        "v_own": (v_own, (B, K, n, Q, h)),
        "documents": (documents, (B, T)),
        "slots": (slots, (B, Q)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"ttt_attention: {name} is {array.shape}, expected {shape}")
    if N % K:
        raise ValueError(f"ttt_attention: {N} query heads are not a multiple of {K} key heads")
    if block < 1:
        raise ValueError(f"ttt_attention: block must be at least 1, found {block}")
    return reference(q, k, v, k_own, v_own, documents, slots, window, block)
