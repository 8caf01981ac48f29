"""Drafter layouts. A new one is one file with a `LAYOUT`, and one line here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eagle_jax.checkpoint.layouts import (
    automodel,
    modelopt,
    orbax,
    safeailab,
    sglang,
    speculators,
    torchspec,
    vllm,
)
from eagle_jax.checkpoint.layouts.base import Layout
from eagle_jax.errors import CheckpointError

LAYOUTS: dict[str, Layout] = {
    "safeailab": safeailab.LAYOUT,
    "sglang": sglang.LAYOUT,
    "vllm": vllm.LAYOUT,
    "speculators": speculators.LAYOUT,
    "torchspec": torchspec.LAYOUT,
    "modelopt": modelopt.LAYOUT,
    "automodel": automodel.LAYOUT,
    "orbax": orbax.LAYOUT,
}
WRITABLE = tuple(name for name, layout in LAYOUTS.items() if layout.write_config is not None)


def detect(names: Iterable[str], config: dict[str, Any]) -> tuple[str, str]:
    """Which layout a drafter is in.

    Args:
      names: its tensors.
      config: its config.json.

    Returns:
      (key of LAYOUTS, what gave it away).

    Raises:
      CheckpointError: neither names nor keys are those of an EAGLE-3 drafter.
    """
    names = frozenset(names)
    eagle = config.get("eagle_config")
    markers = sorted(set(modelopt.MARKERS) & set(eagle)) if isinstance(eagle, dict) else []
    numbered = any(name.startswith("layers.") for name in names)
    midlayer = any(name.startswith("midlayer.") for name in names)
    if config.get("format") == orbax.FORMAT:
        return "orbax", f"config.json says format {orbax.FORMAT}"
    if "speculators_model_type" in config:
        return "speculators", "config.json has speculators_model_type"
    if any(name.startswith("model.") and ".fc." in name for name in names):
        return "automodel", "the tensors' names start with model."
    if "_torchspec_version" in config:
        return "torchspec", "config.json has _torchspec_version"
    if numbered and markers:
        return "modelopt", f"layers.N names and {markers[0]} in eagle_config"
    if numbered:
        return "vllm", "layers.N names"
    if midlayer and config.get("architectures") in (None, [], ["LlamaForCausalLM"]):
        return "safeailab", "midlayer names and no EAGLE-3 architecture"
    if midlayer:
        return "sglang", "midlayer names and an EAGLE-3 architecture"
    raise CheckpointError(
        "not an EAGLE-3 drafter: no tensor is named midlayer.*, layers.N.* or model.layers.N.* (found: "
        f"{', '.join(sorted(names)[:5]) or 'none'})"
    )
