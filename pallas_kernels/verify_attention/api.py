"""The public function of the op: checks shapes, then runs the reference (XLA compiles it for every backend)."""

import jax

from pallas_kernels.verify_attention.reference import reference


def verify_attention(
    q: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    self_mask: jax.Array,
    window: jax.Array | int | None = None,
) -> jax.Array:
    """Softmax attention of T new tokens to the cache and to each other, scaled by head_dim ** -0.5.

    Args:
      q: [B, T, N, h] rotated queries.
      k_new, v_new: [B, K, T, h] rotated keys, and values, of the new tokens; N is a multiple of K.
      k_cache, v_cache: [B, K, S, h]; slot s holds position s.
      positions: [B, T] positions of the new tokens.
      lengths: [B] valid slots per row.
      self_mask: [B, T, T] bool, whether new token i sees new token j; the diagonal must be true.
      window: a query at position p sees positions above p - window only; None sees all.

    Returns:
      [B, T, N, h] in q's dtype; the softmax is float32.

    Raises:
      ValueError: shapes that do not fit together.
    """
    B, T, N, h = q.shape
    K, S = k_cache.shape[1], k_cache.shape[2]
    expected = {
        "k_new": (k_new, (B, K, T, h)),
        "v_new": (v_new, (B, K, T, h)),
        "k_cache": (k_cache, (B, K, S, h)),
        "v_cache": (v_cache, (B, K, S, h)),
        "positions": (positions, (B, T)),
        "lengths": (lengths, (B,)),
        "self_mask": (self_mask, (B, T, T)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"verify_attention: {name} is {array.shape}, expected {shape}")
    if N % K:
        raise ValueError(f"verify_attention: {N} query heads are not a multiple of {K} key heads")
    return reference(q, k_new, v_new, k_cache, v_cache, positions, lengths, self_mask, window)
