"""NVIDIA Model-Optimizer's export: `layers.0.*`, no t2d, captured layers counted as outputs under `eagle_config`."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning
from eagle_jax.checkpoint.layouts.flat import Flat, read_flat
from eagle_jax.config import DrafterConfig

_FLAT = Flat()
# Keys of `eagle_config` that only this project writes.
MARKERS = ("next_layer_regular", "parallel_draft_heads_num_layers", "parallel_draft_step", "use_last_layernorm")


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    return read_flat(values, facts, meaning, _FLAT)


LAYOUT = Layout(name="modelopt", title="NVIDIA Model-Optimizer", read_config=_read)
