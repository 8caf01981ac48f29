"""The op in jnp: the specification, and what runs where no kernel does."""

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row with nothing to see gives numbers and not NaN


def reference(q, k_new, v_new, k_cache, v_cache, positions, lengths, self_mask, window):
    """See `api.verify_attention` for shapes. Cached and new keys share one softmax."""
    B, T, N, h = q.shape
    K, S = k_cache.shape[1], k_cache.shape[2]
    # Heads of one group are rows of one product against their shared keys: [B, K, N/K * T, h].
    grouped = q.reshape(B, T, K, N // K, h).transpose(0, 2, 3, 1, 4).reshape(B, K, N // K * T, h)

    slots = jnp.arange(S)[None, None, :]
    see_cache = slots < lengths[:, None, None]  # [B, 1, S]
    if window is not None:
        see_cache = see_cache & (positions[:, :, None] - slots < window)  # [B, T, S]
        self_mask = self_mask & (positions[:, :, None] - positions[:, None, :] < window)

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:  # -> [B, K, N/K, T, keys] float32
        product = jnp.einsum("bkqh,bksh->bkqs", grouped, keys.astype(q.dtype), preferred_element_type=jnp.float32)
        product = product.reshape(B, K, N // K, T, keys.shape[2]) * h**-0.5
        return jnp.where(mask[:, None, None], product, MASKED)

    logits = jnp.concatenate([scores(k_cache, see_cache), scores(k_new, self_mask)], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype).reshape(B, K, N // K * T, S + T)
    mixed = jnp.einsum("bkqs,bksh->bkqh", weights[..., :S], v_cache.astype(q.dtype))
    mixed = mixed + jnp.einsum("bkqt,bkth->bkqh", weights[..., S:], v_new)
    return mixed.reshape(B, K, N // K, T, h).transpose(0, 3, 1, 2, 4).reshape(B, T, N, h)
