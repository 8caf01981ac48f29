"""The key/value cache: fixed buffers, per-row write positions, writes that drop instead of sliding back."""

import jax
import jax.numpy as jnp

from eagle_jax.records import KVCache, NewKV


def init(num_layers: int, batch: int, num_kv_heads: int, slots: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache; k and v are [L, B, K, S, h]."""
    shape = (num_layers, batch, num_kv_heads, slots, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KVCache, new: NewKV, start: jax.Array, count: jax.Array) -> KVCache:
    """Writes the first `count[b]` of T new entries of row b to slots `start[b]`, `start[b] + 1`, ...

    Args:
      cache: buffers of S slots.
      new: [L, B, K, T, h].
      start: [B] first slot.
      count: [B] entries to write, 0 .. T.

    Entries beyond `count`, and slots beyond S, are dropped. A `dynamic_update_slice` would slide an overrunning write
    back over older entries instead.
    """
    B, T = start.shape[0], new.k.shape[3]
    steps = jnp.arange(T)
    slots = jnp.where(steps[None, :] < count[:, None], start[:, None] + steps[None, :], cache.slots)  # [B, T]
    rows = jnp.arange(B)[:, None]

    def put(buffer: jax.Array, entries: jax.Array) -> jax.Array:
        # Indexing rows explicitly, and not by a vmap, leaves the buffer in its layout: XLA scatters in place.
        entries = entries.astype(buffer.dtype).transpose(1, 3, 0, 2, 4)  # [B, T, L, K, h]
        return buffer.at[:, rows, :, slots].set(entries, mode="drop")

    return KVCache(put(cache.k, new.k), put(cache.v, new.v))


def take_path(new: NewKV, path: jax.Array) -> NewKV:
    """Gathers the entries `path` [B, P] along the token axis: [L, B, K, T, h] -> [L, B, K, P, h]."""
    index = path[None, :, None, :, None]
    return NewKV(jnp.take_along_axis(new.k, index, axis=3), jnp.take_along_axis(new.v, index, axis=3))
