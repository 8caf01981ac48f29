"""The EAGLE-3 (arXiv:2503.01840) and EAGLE-3.1 drafter in one module.

Both share every weight name; what differs is chosen when the module is built:

  * `fc_norm`: each captured state passes its own RMSNorm before `fc` (3.1), so that no layer's scale dominates;
  * `norm_output`: the state fed to the next draft step is the normed one (3.1) or the raw one (3). The head always
    reads the normed one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import DrafterConfig
from eagle_jax.layers.attention import Attend, Attention, attention_inputs
from eagle_jax.layers.linear import Linear, VocabTable
from eagle_jax.layers.mlp import MLP
from eagle_jax.layers.norm import RMSNorm
from eagle_jax.records import DrafterOutput, KVCache, NewKV


class VocabMap(nnx.Variable):
    """An integer table that is stored with the parameters and never trained."""


class DrafterBlock(nnx.Module):
    """A decoder block. The first one attends over [normed embedding, normed feature] and carries the feature."""

    def __init__(self, config: DrafterConfig, *, first: bool, dtype, rngs: nnx.Rngs):
        block = config.block
        width = block.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps=block.norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps=block.norm_eps, dtype=dtype) if first else None
        self.self_attn = Attention(block, 2 * width if first else width, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(width, eps=block.norm_eps, dtype=dtype)
        self.mlp = MLP(block, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, embeddings: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        if self.hidden_norm is None:
            attended, residual = self.input_layernorm(x), x
        else:
            normed = self.hidden_norm(x)
            attended = jnp.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
            residual = normed if self.norm_before_residual else x
        mixed, kept = attend(self.self_attn, attended)
        x = residual + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Eagle3Drafter(nnx.Module):
    """Guesses the tokens after the target's: `fuse` captured states into features, `step`, read `logits`.

    Slot t pairs the feature of the target's state at position t with the embedding of token t + 1, and is read for
    token t + 2. Without its own embedding or head the drafter must be bound to a target that lends them (`bind`).
    """

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width, eps, fan_in = config.block.hidden_size, config.block.norm_eps, config.target_hidden_size
        shared = {"dtype": dtype, "rngs": rngs}
        self.fc_norm = RMSNorm(config.num_captured, fan_in, eps=eps, dtype=dtype) if config.fc_norm else None
        self.input_norm = RMSNorm(config.num_captured * fan_in, eps=eps, dtype=dtype) if config.norm_before_fc else None
        self.fc = Linear(config.num_captured * fan_in, width, bias=config.fc_bias, **shared)
        self.layers = nnx.List([DrafterBlock(config, first=i == 0, **shared) for i in range(config.num_layers)])
        self.norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.embed = VocabTable(config.vocab_size, width, **shared) if config.own_embedding else None
        self.lm_head = VocabTable(config.draft_vocab_size, width, **shared) if config.own_head else None
        self.draft_to_target = (
            None if config.full_vocabulary else VocabMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))
        )

    def bind(self, embed: VocabTable, head: VocabTable) -> None:
        """Borrows the target's tables where the drafter has none of its own; the arrays are shared, not copied."""
        if self.embed is None:
            self.embed = nnx.data(embed)
        if self.lm_head is None:
            self.lm_head = nnx.data(head)

    @property
    def dtype(self) -> jnp.dtype:
        return self.norm.scale.get_value().dtype

    def fuse(self, aux: jax.Array) -> jax.Array:
        """[B, T, A, D] captured states -> [B, T, H] features.

        Raises:
          ValueError: A or D is not what `fc` was made for.
        """
        B, T, A, D = aux.shape
        expected = (self.config.num_captured, self.config.target_hidden_size)
        if (A, D) != expected:
            raise ValueError(f"the drafter fuses {expected[0]} states of width {expected[1]}, found {A} of width {D}")
        if self.fc_norm is not None:
            aux = self.fc_norm(aux)
        aux = aux.reshape(B, T, A * D)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        return self.fc(aux.astype(self.dtype))

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """[...] target ids -> [..., H]."""
        assert self.embed is not None, "bind the drafter to its target first"
        return self.embed.embed(tokens).astype(self.dtype)

    def step(
        self,
        embeddings: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        lengths: jax.Array,
        *,
        self_mask: jax.Array | None = None,
    ) -> DrafterOutput:
        """Runs T slots per row against the drafter's cache; writes nothing.

        Args:
          embeddings: [B, T, H], of the token after each slot's position.
          features: [B, T, H], fused target states, or the `feedback` of the step before.
          positions: [B, T] slot numbers.
          cache: keys and values of earlier slots, one entry per drafter block.
          lengths: [B] valid slots of the cache.
          self_mask: [B, T, T] bool; None is causal.
        """
        block = self.config.block
        inputs = attention_inputs(block, positions, lengths, self_mask)

        def attend(i: int, attention: Attention, x: jax.Array):
            return attention(x, cache.k[i], cache.v[i], inputs, block.sliding_window)

        output, feedback, kv = self.run_blocks(features, embeddings, attend)
        keys, values = zip(*kv, strict=True)
        return DrafterOutput(output, feedback, NewKV(jnp.stack(keys), jnp.stack(values)))

    def run_blocks(
        self, features: jax.Array, embeddings: jax.Array, attend: Callable[[int, Attention, jax.Array], tuple]
    ) -> tuple[jax.Array, jax.Array, list]:
        """The blocks and the final norm, with the caller's attention.

        Args:
          features, embeddings: [B, T, H] each.
          attend: (block number, its attention module, normed input) -> (mixed [B, T, H], what to keep).

        Returns:
          (output, feedback, what each block kept); see `DrafterOutput`.
        """
        x, kept = features, []
        for i, layer in enumerate(self.layers):
            x, of_layer = layer(x, embeddings, functools.partial(attend, i))
            kept.append(of_layer)
        output = self.norm(x)
        return output, output if self.config.norm_output else x, kept

    def logits(self, output: jax.Array) -> jax.Array:
        """[..., H] -> [..., U] float32, over the draft vocabulary."""
        assert self.lm_head is not None, "bind the drafter to its target first"
        return self.lm_head.scores(output)

    def to_target(self, draft_ids: jax.Array) -> jax.Array:
        """[...] draft ids -> [...] target ids."""
        if self.draft_to_target is None:
            return draft_ids
        return jnp.take(self.draft_to_target[...], draft_ids, mode="clip")
