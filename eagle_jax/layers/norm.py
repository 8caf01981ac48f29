"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx


def rms_normalize(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - scale.ndim)))
    return (x32 * inverse * scale).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm with a plain scale (multiplies by `scale`, not by `1 + scale`).

    `shape` may have leading axes: they broadcast against the input's, as in one norm per captured layer ([A, D]).
    """

    def __init__(self, *shape: int, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(shape, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_normalize(x, self.scale[...], self.eps)
