"""The `speculators` library: `layers.N.*`, and a configuration that nests the block's under the algorithm's."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning
from eagle_jax.checkpoint.layouts.capture import KEY, no_ids, read_ids
from eagle_jax.checkpoint.layouts.flat import (
    HARMLESS,
    check_tied,
    finish_config,
    read_block,
    read_norm_output,
    write_block,
    write_flags,
)
from eagle_jax.checkpoint.layouts.refuse import refuse_other_methods
from eagle_jax.checkpoint.layouts.vllm import cannot_serve
from eagle_jax.config import DrafterConfig
from eagle_jax.config_reader import ConfigReader

_HARMLESS = (
    *HARMLESS,
    "base_model_ep_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "embed_requires_grad",
    "has_no_defaults_at_init",
    "speculators_config",
    "speculators_version",
)
_SPECULATIVE_TOKENS = 4  # what vLLM drafts per round when nobody says otherwise


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    reader = ConfigReader(values, facts.where)
    reader.ignore(*_HARMLESS)
    kind = reader.str("speculators_model_type")
    if kind != "eagle3":
        hint = "P-EAGLE (parallel drafting)" if kind == "peagle" else f"{kind!r}"
        raise reader.fail("speculators_model_type", f"{hint} is not supported, only 'eagle3'")
    refuse_other_methods(reader, ConfigReader({}, facts.where), facts)
    layer = reader.child("transformer_layer_config")
    assert layer is not None  # a required child is never None
    layer.ignore(*HARMLESS)
    warnings = []
    if "norm_before_residual" not in reader:
        warnings.append(
            f"{facts.where}: norm_before_residual is absent and read as true, as vLLM does for this layout; a "
            "converted SafeAILab drafter needs false"
        )
    ids = read_ids(reader)
    if ids is None:
        warnings.append(no_ids(facts.where))
    num_layers, vocab_size = layer.int("num_hidden_layers"), layer.int("vocab_size")
    fields: dict[str, Any] = {
        "block": read_block(layer, facts, num_layers),
        "num_layers": num_layers,
        "target_hidden_size": reader.int("target_hidden_size", layer.int("hidden_size")),
        "vocab_size": vocab_size,
        "draft_vocab_size": reader.int("draft_vocab_size", vocab_size),
        "max_position": layer.int("max_position_embeddings", 2048),
        "capture_layers": ids,
        "num_captured": len(ids) if ids else 3,
        "fc_norm": reader.bool("fc_norm", False),
        "norm_before_fc": reader.bool("norm_before_fc", False),
        "norm_output": read_norm_output(reader, meaning),
        "norm_before_residual": reader.bool("norm_before_residual", True),
    }
    for level in (reader, layer):
        check_tied(level, facts)
        level.finish()
    return finish_config(fields, facts), warnings


def _write(config: DrafterConfig, dtype: str, target: str | None) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "torch_dtype": dtype,
        **write_flags(config),
        KEY: None if config.capture_layers is None else list(config.capture_layers),
        "embed_requires_grad": False,
        "transformer_layer_config": write_block(config),
    }


def _cannot_store(config: DrafterConfig) -> list[str]:
    problems = cannot_serve(config)
    if config.capture_layers is None and config.num_captured != 3:
        problems.append(f"{config.num_captured} captured layers without their ids")
    return problems


def _warnings(config: DrafterConfig) -> list[str]:
    if config.target_hidden_size != config.block.hidden_size:
        return ["speculators' own code wants the drafter as wide as its target; vLLM reads this file"]
    return []


LAYOUT = Layout(
    name="speculators",
    title="speculators",
    read_config=_read,
    write_config=_write,
    mirror_norms=False,
    cannot_store=_cannot_store,
    write_warnings=_warnings,
)
