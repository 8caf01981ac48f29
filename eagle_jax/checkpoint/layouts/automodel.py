"""NVIDIA NeMo Automodel's checkpoints: every name but the head's under `model.`, captured layers never written."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning
from eagle_jax.checkpoint.layouts.flat import Flat, read_flat
from eagle_jax.config import DrafterConfig

# The configuration starts from the target's, so its depth may be the target's.
_FLAT = Flat(layers_from_file=True)


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    return read_flat(values, facts, meaning, _FLAT)


LAYOUT = Layout(name="automodel", title="NVIDIA NeMo Automodel", read_config=_read)
