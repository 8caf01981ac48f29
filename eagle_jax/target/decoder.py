"""The one decoder body. Families differ in their configuration only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import BlockConfig, TargetConfig, check_capture_layers
from eagle_jax.layers.attention import Attend, Attention, attention_inputs, sequence_inputs
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

    def __call__(self, x: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        mixed, kept = attend(self.self_attn, self.input_layernorm(x))
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), kept


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
        inputs = attention_inputs(self.config.block, positions, lengths, self_mask)

        def attend(attention: Attention, x: jax.Array, layer: KVCache, window):
            return attention(x, layer.k, layer.v, inputs, window)

        hidden, aux, (k, v) = self._run_blocks(tokens, capture, attend, cache)
        return TargetOutput(self.logits(hidden) if logits else None, hidden, aux, NewKV(k, v))

    def read(
        self, tokens: jax.Array, positions: jax.Array, documents: jax.Array, *, capture: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array | None]:
        """One pass over whole sequences, for training: no cache, no logits, packed documents apart.

        Args:
          tokens: [B, T] ids in [0, V); positions: [B, T] within each document.
          documents: [B, T] number of each token's document; a document's tokens are adjacent.
          capture: boundaries to return.

        Returns:
          (hidden [B, T, D] after the final norm, aux [B, T, A, D] or None without `capture`).

        Raises:
          ConfigError: captured ids that collide, descend or leave [0, L].
        """
        inputs = sequence_inputs(self.config.block, positions, documents)

        def attend(attention: Attention, x: jax.Array, layer: None, window):
            return attention.over_sequence(x, inputs, window), None

        hidden, aux, _ = self._run_blocks(tokens, capture, attend, None)
        return hidden, aux

    def _run_blocks(
        self, tokens: jax.Array, capture: tuple[int, ...], attend: Callable[..., tuple[jax.Array, Any]], per_layer: Any
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """Embeds, runs the blocks and the final norm; `attend` gets a layer's slice of `per_layer`, and its window."""
        capture = check_capture_layers(capture, self.config.num_layers)
        x = self.embed.embed(tokens)
        depth = self.config.num_layers
        blocks, parameters = nnx.split(self.layers)
        # Captured states go to one slot each of a small carried buffer; the other layers overwrite a spare last slot.
        # So a layer costs one [B, T, D] write, in place, wherever the captured layers are.
        slots = jnp.array([capture.index(i) if i in capture else len(capture) for i in range(depth)], jnp.int32)
        aux = jnp.zeros((len(capture) + 1, *x.shape), x.dtype) if capture else None

        def body(carry, layer):
            x, aux = carry
            parameters, of_layer, slot, window = layer
            if aux is not None:
                aux = jax.lax.dynamic_update_index_in_dim(aux, x, slot, axis=0)
            block = nnx.merge(blocks, parameters)
            x, kept = block(x, lambda attention, normed: attend(attention, normed, of_layer, window))
            return (x, aux), kept

        (x, aux), kept = jax.lax.scan(body, (x, aux), (parameters, per_layer, slots, self._windows()))
        if aux is not None:
            if depth in capture:
                aux = aux.at[capture.index(depth)].set(x)
            aux = jnp.moveaxis(aux[: len(capture)], 0, 2)
        return self.norm(x), aux, kept

    def _windows(self) -> jax.Array | None:
        """[L] window per layer, or None when no layer slides."""
        window, sliding = self.config.block.sliding_window, self.config.sliding_layers
        if window is None or sliding is None or not any(sliding):
            return None
        unlimited = jnp.iinfo(jnp.int32).max
        return jnp.array([window if slides else unlimited for slides in sliding], jnp.int32)
