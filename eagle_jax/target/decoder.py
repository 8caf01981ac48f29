"""The one decoder body. Families differ in their configuration only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import BlockConfig, TargetConfig, check_capture_layers
from eagle_jax.layers.attention import Attention, AttentionInputs, attention_inputs
from eagle_jax.layers.linear import VocabTable
from eagle_jax.layers.mlp import MLP
from eagle_jax.layers.norm import RMSNorm
from eagle_jax.records import KVCache, NewKV, TargetOutput


class Block(nnx.Module):
    """x + attention(norm(x)), then + mlp(norm(.)). `stack` prepends a layer axis to every parameter."""

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs, stack: tuple[int, ...] = ()):
        self.input_layernorm = RMSNorm(*stack, config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.self_attn = Attention(config, config.hidden_size, dtype=dtype, rngs=rngs, stack=stack)
        self.post_attention_layernorm = RMSNorm(*stack, config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs, stack=stack)

    def __call__(
        self, x: jax.Array, k_cache: jax.Array, v_cache: jax.Array, inputs: AttentionInputs, window
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixed, k, v = self.self_attn(self.input_layernorm(x), k_cache, v_cache, inputs, window)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Decoder(nnx.Module):
    """A Llama-shaped decoder whose blocks are stored stacked and run by one scan: compile time ignores depth."""

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width = config.block.hidden_size
        self.embed = VocabTable(config.vocab_size, width, dtype=dtype, rngs=rngs)
        self.layers = Block(config.block, dtype=dtype, rngs=rngs, stack=(config.num_layers,))
        self.norm = RMSNorm(width, eps=config.block.norm_eps, dtype=dtype)
        self.lm_head = None if config.tied_head else VocabTable(config.vocab_size, width, dtype=dtype, rngs=rngs)

    @property
    def head(self) -> VocabTable:
        return self.embed if self.lm_head is None else self.lm_head

    @property
    def dtype(self) -> jnp.dtype:
        return self.norm.scale.get_value().dtype

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] final hidden states -> [..., V] float32."""
        return self.head.scores(hidden)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        lengths: jax.Array,
        *,
        self_mask: jax.Array | None = None,
        capture: tuple[int, ...] = (),
        logits: bool = True,
    ) -> TargetOutput:
        """Runs T new tokens per row against a cache of committed ones; writes nothing.

        Args:
          tokens: [B, T] ids in [0, V).
          positions: [B, T].
          cache: committed keys and values.
          lengths: [B] valid slots of the cache.
          self_mask: [B, T, T] bool, which new tokens see which; None is causal.
          capture: boundaries to return (id i = the stream entering block i, L = after the last block).
          logits: whether to apply the head.

        Raises:
          ConfigError: captured ids that collide, descend or leave [0, L].
        """
        capture = check_capture_layers(capture, self.config.num_layers)
        inputs = attention_inputs(self.config.block, positions, lengths, self_mask)
        x, aux, kv = self._run_blocks(self.embed.embed(tokens), cache, inputs, capture)
        hidden = self.norm(x)
        return TargetOutput(self.logits(hidden) if logits else None, hidden, aux, kv)

    def _run_blocks(
        self, x: jax.Array, cache: KVCache, inputs: AttentionInputs, capture: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array | None, NewKV]:
        depth = self.config.num_layers
        blocks, parameters = nnx.split(self.layers)
        # Captured states go to one slot each of a small carried buffer; the other layers overwrite a spare last slot.
        # So a layer costs one [B, T, D] write, in place, wherever the captured layers are.
        slots = jnp.array([capture.index(i) if i in capture else len(capture) for i in range(depth)], jnp.int32)
        aux = jnp.zeros((len(capture) + 1, *x.shape), x.dtype) if capture else None

        def body(carry, layer):
            x, aux = carry
            parameters, k_cache, v_cache, slot, window = layer
            if aux is not None:
                aux = jax.lax.dynamic_update_index_in_dim(aux, x, slot, axis=0)
            x, k, v = nnx.merge(blocks, parameters)(x, k_cache, v_cache, inputs, window)
            return (x, aux), NewKV(k, v)

        (x, aux), kv = jax.lax.scan(body, (x, aux), (parameters, cache.k, cache.v, slots, self._windows(cache)))
        if aux is None:
            return x, None, kv
        if depth in capture:
            aux = aux.at[capture.index(depth)].set(x)
        return x, jnp.moveaxis(aux[: len(capture)], 0, 2), kv

    def _windows(self, cache: KVCache) -> jax.Array | None:
        """[L] window per layer, or None when no layer slides."""
        window, sliding = self.config.block.sliding_window, self.config.sliding_layers
        if window is None or sliding is None or not any(sliding):
            return None
        unlimited = jnp.iinfo(jnp.int32).max
        return jnp.array([window if slides else unlimited for slides in sliding], jnp.int32)
