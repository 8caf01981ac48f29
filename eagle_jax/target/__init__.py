"""Targets. A new family is one file with `read_config` and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eagle_jax.config import TargetConfig
from eagle_jax.errors import ConfigError
from eagle_jax.target import llama, mistral, qwen2, qwen3

# Hugging Face `model_type` -> reader of its configuration.
FAMILIES: dict[str, Callable[[dict[str, Any], str], TargetConfig]] = {
    "llama": llama.read_config,
    "mistral": mistral.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}


def read_target_config(values: dict[str, Any], where: str) -> TargetConfig:
    """Reads a Hugging Face configuration by its `model_type`.

    Raises:
      ConfigError: a family that is not supported, or a key that its reader refuses.
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where}: model_type {family!r} is not supported ({', '.join(FAMILIES)})")
    try:
        return FAMILIES[family](values, where)
    except ConfigError as error:
        if where in str(error):
            raise
        raise ConfigError(f"{where}: {error}") from error  # what the records themselves refuse knows no file
