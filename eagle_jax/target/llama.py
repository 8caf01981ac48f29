"""Llama 2, 3, 3.1, 3.2, 3.3, and models that share the shape and the name (SmolLM2)."""

from __future__ import annotations

from typing import Any

from eagle_jax.config import TargetConfig
from eagle_jax.target.hf import read_decoder


def read_config(values: dict[str, Any], where: str) -> TargetConfig:
    """`attention_bias` and `mlp_bias` follow their keys; no window."""
    return read_decoder(values, where, family="llama", qkv_bias=False, qk_norm=False, sliding=False)
