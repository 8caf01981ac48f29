"""Rotary position embeddings: default, linear, llama3 and yarn frequencies, half-split rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import RotaryConfig
from eagle_jax.errors import ConfigError


def inverse_frequencies(config: RotaryConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns ([head_dim / 2] float32 radians per position, factor on cos and sin)."""
    plain = 1.0 / config.base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.kind == "default":
        return plain.astype(np.float32), 1.0
    if config.kind == "linear":
        return (plain / _set(config, "factor")).astype(np.float32), 1.0
    if config.kind == "llama3":
        return _llama3(config, plain).astype(np.float32), 1.0
    if config.kind == "yarn":
        frequencies, factor = _yarn(config, plain, head_dim)
        return frequencies.astype(np.float32), factor
    raise ConfigError(f"rotary kind {config.kind!r} is not supported (default, linear, llama3, yarn)")


def _set(config: RotaryConfig, name: str) -> float:
    value = getattr(config, name)
    if value is None:
        raise ConfigError(f"rotary kind {config.kind!r} needs {name}")
    return value


def _llama3(config: RotaryConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    low, high = _set(config, "low_freq_factor"), _set(config, "high_freq_factor")
    rotations = _set(config, "original_max_position") * plain / (2 * math.pi)
    share_kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return plain * (share_kept + (1 - share_kept) / _set(config, "factor"))


def _yarn(config: RotaryConfig, plain: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """YaRN (arXiv:2309.00071): a linear ramp over dimensions from kept to interpolated, and hotter attention."""
    factor, original = _set(config, "factor"), _set(config, "original_max_position")

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.base))

    low, high = dimension_of(_set(config, "beta_fast")), dimension_of(_set(config, "beta_slow"))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    frequencies = plain * (1 - ramp) + plain / factor * ramp

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if config.attention_factor is not None:
        return frequencies, config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return frequencies, magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return frequencies, magnitude(1.0)


def rotary_tables(config: RotaryConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, T] positions -> (cos, sin), each [B, T, head_dim / 2] float32."""
    frequencies, factor = inverse_frequencies(config, head_dim)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [B, T, heads, h] by tables of [B, T, h / 2]; dimension i pairs with i + h / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
