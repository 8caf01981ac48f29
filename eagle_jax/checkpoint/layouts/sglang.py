"""SpecForge's export, which SGLang serves: `midlayer.*`, captured layers counted as outputs under `eagle_config`."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning, midlayer_rules
from eagle_jax.checkpoint.layouts.flat import Flat, read_flat, write_flat
from eagle_jax.config import DrafterConfig

_FLAT = Flat()


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    config, warnings = read_flat(values, facts, meaning, _FLAT)
    # SpecForge writes `norm_output` and never `norm_before_residual`.
    if config.norm_output and "norm_before_residual" not in values:
        warnings.append(
            f"{facts.where}: norm_output is read as vLLM and SGLang serve it (the normed state is fed back); a drafter "
            "trained by a SpecForge that only meant the norm before the head needs norm_output_meaning='specforge'"
        )
    return config, warnings


def _write(config: DrafterConfig, dtype: str, target: str | None) -> dict[str, Any]:
    values = write_flat(config, "LlamaForCausalLMEagle3", dtype, nested_ids=True)
    if not config.own_head:
        values["draft_vocab_size"] = None  # SGLang borrows the target's head only then
    if config.fc_bias:
        values["bias"] = True
    return values


def _cannot_store(config: DrafterConfig) -> list[str]:
    block = config.block
    problems = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "attention or MLP biases": block.qkv_bias or block.o_bias or block.mlp_bias,
        "q/k norms": block.qk_norm,
        "a sliding window": block.sliding_window is not None,
        f"the activation {block.activation}": block.activation != "silu",
    }
    return [problem for problem, found in problems.items() if found]


def _warnings(config: DrafterConfig) -> list[str]:
    if config.own_embedding and config.block.hidden_size == config.target_hidden_size:
        return ["SGLang uses the target's embedding instead of the drafter's own"]
    return []


LAYOUT = Layout(
    name="sglang",
    title="SpecForge / SGLang",
    read_config=_read,
    write_config=_write,
    write_rules=midlayer_rules,
    mirror_norms=True,
    cannot_store=_cannot_store,
    write_warnings=_warnings,
)
