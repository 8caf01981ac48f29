"""Qwen3 (dense): RMSNorm over each head's query and key, and a head_dim of its own."""

from __future__ import annotations

from typing import Any

from eagle_jax.config import TargetConfig
from eagle_jax.target.hf import read_decoder


def read_config(values: dict[str, Any], where: str) -> TargetConfig:
    return read_decoder(
        values, where, family="qwen3", qkv_bias=False, qk_norm=True, sliding=False, default_head_dim=128
    )
