"""What vLLM reads without translation: `layers.N.*`, captured layers counted as inputs at the top level."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning
from eagle_jax.checkpoint.layouts.flat import Flat, read_flat, write_flat
from eagle_jax.config import DrafterConfig

_FLAT = Flat()


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    return read_flat(values, facts, meaning, _FLAT)


def _write(config: DrafterConfig, dtype: str, target: str | None) -> dict[str, Any]:
    architecture = "Eagle3Qwen3ForCausalLM" if config.block.qk_norm else "LlamaForCausalLMEagle3"
    return write_flat(config, architecture, dtype)


def cannot_serve(config: DrafterConfig) -> list[str]:
    """What vLLM's dense EAGLE-3 classes lack."""
    block = config.block
    problems = {
        "a bias of fc": config.fc_bias,
        "q/k/v biases without an o_proj bias": block.qkv_bias and not block.o_bias and not block.qk_norm,
        "an o_proj bias without q/k/v biases": block.o_bias and not block.qkv_bias,
        "q/k norms together with an o_proj bias": block.qk_norm and block.o_bias,
        "q/k norms together with MLP biases": block.qk_norm and block.mlp_bias,
        f"the activation {block.activation}": block.activation != "silu",
    }
    return [problem for problem, found in problems.items() if found]


LAYOUT = Layout(
    name="vllm",
    title="vLLM",
    read_config=_read,
    write_config=_write,
    mirror_norms=True,
    cannot_store=cannot_serve,
)
