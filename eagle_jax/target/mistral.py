"""Mistral: Llama's shape; `sliding_window`, when set, applies to every layer."""

from __future__ import annotations

from typing import Any

from eagle_jax.config import TargetConfig
from eagle_jax.target.hf import read_decoder


def read_config(values: dict[str, Any], where: str) -> TargetConfig:
    return read_decoder(values, where, family="mistral", qkv_bias=False, qk_norm=False, sliding=True)
