"""Qwen2 and Qwen2.5: q, k and v always have a bias, o never."""

from __future__ import annotations

from typing import Any

from eagle_jax.config import TargetConfig
from eagle_jax.target.hf import read_decoder


def read_config(values: dict[str, Any], where: str) -> TargetConfig:
    return read_decoder(values, where, family="qwen2", qkv_bias=True, qk_norm=False, sliding=False)
