"""Small random models for tests."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import BlockConfig, DrafterConfig, RotaryConfig, TargetConfig
from eagle_jax.drafter.eagle3 import Eagle3Drafter
from eagle_jax.target.decoder import Decoder

VOCAB = 61


def block_config(**changes) -> BlockConfig:
    fields = {
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_size": 48,
        "norm_eps": 1e-5,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "activation": "silu",
        "rotary": RotaryConfig("default", 10000.0),
        "sliding_window": None,
    }
    return BlockConfig(**(fields | changes))


def target_config(*, block: dict | None = None, **changes) -> TargetConfig:
    fields = {
        "family": "llama",
        "block": block_config(**(block or {})),
        "num_layers": 6,
        "vocab_size": VOCAB,
        "max_position": 512,
        "tied_head": True,
        "sliding_layers": None,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
    }
    return TargetConfig(**(fields | changes))


def drafter_config(target: TargetConfig, *, block: dict | None = None, **changes) -> DrafterConfig:
    fields = {
        "block": dataclasses.replace(target.block, **({"sliding_window": None} | (block or {}))),
        "num_layers": 1,
        "target_hidden_size": target.block.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "max_position": target.max_position,
        "capture_layers": (2, target.num_layers // 2, target.num_layers - 1),
        "num_captured": 3,
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_output": True,
        "norm_before_residual": False,
        "fc_bias": False,
        "own_embedding": False,
        "own_head": False,
    }
    return DrafterConfig(**(fields | changes))


def sharpen(model: nnx.Module, factor: float) -> None:
    """Scales every kernel and table: random models of this size then prefer clearly different tokens."""
    state = nnx.state(model, nnx.Param)
    nnx.update(model, nnx.map_state(lambda path, p: p * factor if path[-1] in ("kernel", "weight") else p, state))


def target(seed: int = 0, *, dtype=jnp.float32, **changes) -> Decoder:
    model = Decoder(target_config(**changes), dtype=dtype, rngs=nnx.Rngs(seed))
    sharpen(model, 8.0)
    return model


def drafter(target_model: Decoder, seed: int = 1, *, dtype=jnp.float32, **changes) -> Eagle3Drafter:
    model = Eagle3Drafter(drafter_config(target_model.config, **changes), dtype=dtype, rngs=nnx.Rngs(seed))
    sharpen(model, 8.0)
    model.bind(target_model.embed, target_model.head)
    return model
