"""A drafter that says what a table tells it to: perfect, wrong, or anything between."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax import nnx

from eagle_jax.records import DrafterOutput, KVCache, NewKV


class Table(nnx.Variable):
    pass


class ScriptedDrafter(nnx.Module):
    """Guesses `table[row, position]` for every position. The state it passes along is the slot's position."""

    def __init__(self, target, table: np.ndarray):
        config = tiny.drafter_config(target.config)
        self.config = dataclasses.replace(config, block=dataclasses.replace(config.block, num_kv_heads=1, num_heads=1))
        self.table = Table(jnp.asarray(table, jnp.int32))
        self.dtype = jnp.float32

    def bind(self, embed, head) -> None:
        pass

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        return tokens[..., None].astype(jnp.float32)

    def fuse(self, aux: jax.Array) -> jax.Array:
        return aux[..., 0, :1]

    def step(self, embeddings, features, positions, cache: KVCache, lengths, *, self_mask=None) -> DrafterOutput:
        slots = positions[..., None].astype(jnp.float32)
        empty = jnp.zeros((1, positions.shape[0], 1, positions.shape[1], self.config.block.head_dim))
        return DrafterOutput(slots, slots, NewKV(empty, empty))

    def logits(self, output: jax.Array) -> jax.Array:
        slots = output[..., 0].astype(jnp.int32)  # slot t is read for token t + 2
        tokens = jnp.take_along_axis(self.table[...], jnp.clip(slots + 2, 0, self.table.shape[1] - 1), axis=1)
        return jax.nn.one_hot(tokens, self.config.draft_vocab_size)

    def to_target(self, draft_ids: jax.Array) -> jax.Array:
        return draft_ids


def whole_texts(prompts: list[list[int]], outputs: list[list[int]], rows: int | None = None) -> np.ndarray:
    """[rows, longest] tokens of prompt + output, padded with 0."""
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    table = np.zeros((rows or len(texts), max(map(len, texts)) + 16), np.int32)
    for i, text in enumerate(texts):
        table[i, : len(text)] = text
    return table
