"""TorchSpec's exporter: `_torchspec_version`, captured layers counted as outputs under `eagle_config`."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning
from eagle_jax.checkpoint.layouts.flat import Flat, read_flat
from eagle_jax.config import DrafterConfig

# Its `--vllm` form adds 1 to the nested ids as well as to the top level's.
_FLAT = Flat(extra_harmless=("_torchspec_version",), nested_may_be_shifted=True)


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    return read_flat(values, facts, meaning, _FLAT)


LAYOUT = Layout(name="torchspec", title="TorchSpec", read_config=_read)
