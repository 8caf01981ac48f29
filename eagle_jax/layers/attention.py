"""Grouped-query attention of new tokens to a cache and to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import BlockConfig
from eagle_jax.layers.linear import Linear
from eagle_jax.layers.norm import RMSNorm
from eagle_jax.layers.rotary import rotary_tables, rotate
from eagle_jax.records import record
from pallas_kernels.ttt_attention import ttt_attention
from pallas_kernels.verify_attention import verify_attention


@record
class AttentionInputs:
    """What every layer of one forward pass shares.

    positions: [B, T]; cos, sin: [B, T, h / 2]; lengths: [B] valid cache slots; self_mask: [B, T, T] bool.
    """

    positions: jax.Array
    cos: jax.Array
    sin: jax.Array
    lengths: jax.Array
    self_mask: jax.Array


def attention_inputs(
    config: BlockConfig, positions: jax.Array, lengths: jax.Array, self_mask: jax.Array | None
) -> AttentionInputs:
    """Builds the shared inputs; without `self_mask` the new tokens see each other causally."""
    B, T = positions.shape
    if self_mask is None:
        self_mask = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    cos, sin = rotary_tables(config.rotary, config.head_dim, positions)
    return AttentionInputs(positions, cos, sin, lengths, self_mask)


@record
class SequenceInputs:
    """What every layer of one pass over whole sequences shares.

    cos, sin: [B, T, h / 2]; documents: [B, T].
    """

    cos: jax.Array
    sin: jax.Array
    documents: jax.Array


def sequence_inputs(config: BlockConfig, positions: jax.Array, documents: jax.Array) -> SequenceInputs:
    """Builds the shared inputs from [B, T] positions and document numbers."""
    cos, sin = rotary_tables(config.rotary, config.head_dim, positions)
    return SequenceInputs(cos, sin, documents)


# What a block does with its attention module and the normed input: returns the mixed states [B, T, width], and whatever
# the caller wants back from every layer. So one block serves decoding (a cache) and training (whole sequences).
Attend = Callable[["Attention", jax.Array], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Projections, optional per-head norms, rotation, attention. `in_size` may differ from the residual's width."""

    def __init__(self, config: BlockConfig, in_size: int, *, dtype, rngs: nnx.Rngs, stack: tuple[int, ...] = ()):
        self.config = config
        c, shared = config, {"dtype": dtype, "rngs": rngs, "stack": stack}
        self.q_proj = Linear(in_size, c.num_heads * c.head_dim, bias=c.qkv_bias, **shared)
        self.k_proj = Linear(in_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias, **shared)
        self.v_proj = Linear(in_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias, **shared)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias, **shared)
        self.q_norm = RMSNorm(*stack, c.head_dim, eps=c.norm_eps, dtype=dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(*stack, c.head_dim, eps=c.norm_eps, dtype=dtype) if c.qk_norm else None

    def project(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, T, in] -> rotated queries [B, T, N, h], rotated keys and values, each [B, K, T, h]."""
        B, T, _ = x.shape
        c = self.config
        q = self.q_proj(x).reshape(B, T, c.num_heads, c.head_dim)
        k = self.k_proj(x).reshape(B, T, c.num_kv_heads, c.head_dim)
        v = self.v_proj(x).reshape(B, T, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin).swapaxes(1, 2), v.swapaxes(1, 2)

    def output(self, mixed: jax.Array) -> jax.Array:
        """[B, T, N, h] -> [B, T, width]."""
        return self.o_proj(mixed.reshape(*mixed.shape[:2], -1))

    def __call__(
        self, x: jax.Array, k_cache: jax.Array, v_cache: jax.Array, inputs: AttentionInputs, window
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attends to a cache and to the new tokens: [B, T, in] -> ([B, T, width], new keys and values [B, K, T, h])."""
        q, k, v = self.project(x, inputs.cos, inputs.sin)
        mixed = verify_attention(q, k, v, k_cache, v_cache, inputs.positions, inputs.lengths, inputs.self_mask, window)
        return self.output(mixed), (k, v)

    def over_sequence(self, x: jax.Array, inputs: SequenceInputs, window) -> jax.Array:
        """Causal attention within documents: [B, T, in] -> [B, T, width]."""
        q, k, v = self.project(x, inputs.cos, inputs.sin)
        return self.output(ttt_attention(q, k, v, inputs.documents, window=window))
