"""SafeAILab's EAGLE repository: `midlayer.*`, a Llama configuration with `draft_vocab_size`, no switches."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning, midlayer_rules
from eagle_jax.checkpoint.layouts.flat import Flat, read_flat, write_flat
from eagle_jax.config import DrafterConfig, default_capture_layers

_FLAT = Flat(needs_draft_vocab_size=True)


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    config, warnings = read_flat(values, facts, meaning, _FLAT)
    base = config.block.rotary.base
    if base != 10000.0 and "norm_before_residual" not in values:
        warnings.append(
            f"{facts.where}: rope_theta is {base:g}; SafeAILab's trainer ignores it and uses 10000, so a drafter "
            "trained there may do better with 10000"
        )
    return config, warnings


def _write(config: DrafterConfig, dtype: str, target: str | None) -> dict[str, Any]:
    return write_flat(config, "LlamaForCausalLM", dtype)


def _cannot_store(config: DrafterConfig) -> list[str]:
    block = config.block
    problems = {
        f"{config.num_layers} blocks": config.num_layers > 1,
        "a drafter without its own lm_head": not config.own_head,
        "biases": block.qkv_bias or block.o_bias or block.mlp_bias,
        "q/k norms": block.qk_norm,
        "a sliding window": block.sliding_window is not None,
    }
    return [problem for problem, found in problems.items() if found]


def _warnings(config: DrafterConfig) -> list[str]:
    flags = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    ignored = [name for name in flags if getattr(config, name)]
    if config.block.head_dim * config.block.num_heads != config.block.hidden_size:
        ignored.append("head_dim")
    ids = config.capture_layers
    # The repository's code captures the default layers of any target; ids[2] + 3 is the depth they would belong to.
    if ids is not None and (len(ids) != 3 or ids != default_capture_layers(ids[2] + 3)):
        ignored.append("the captured layers")
    if not ignored:
        return []
    return [f"SafeAILab's own code ignores {', '.join(ignored)}; vLLM reads them from this file"]


LAYOUT = Layout(
    name="safeailab",
    title="SafeAILab EAGLE",
    read_config=_read,
    write_config=_write,
    write_rules=midlayer_rules,
    cannot_store=_cannot_store,
    write_warnings=_warnings,
)
