"""Drafters that resemble EAGLE-3 and are something else: each is refused by its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts
from eagle_jax.config_reader import ConfigReader
from eagle_jax.errors import CheckpointError

_LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENT_TENSORS = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")


def refuse_other_methods(reader: ConfigReader, eagle: ConfigReader, facts: Facts) -> None:
    """Raises ConfigError or CheckpointError for what EAGLE-3 is not, naming it."""
    reader.only("quantization_config")
    for key in _LATENT_KEYS:
        if key in reader:
            raise reader.fail(key, "drafters with multi-head latent attention (DeepSeek, Kimi) are not supported")
    for name in reader.list("architectures", []):
        if any(word in str(name).lower() for word in ("deepseek", "kimi")):
            raise reader.fail("architectures", f"{name}: multi-head latent attention is not supported")
        if "peagle" in str(name).lower():
            raise reader.fail("architectures", f"{name}: P-EAGLE (parallel drafting) is not supported")
    reader.only("parallel_drafting", False)
    for level in (reader, eagle):
        # Without aux states there is no fc: such heads read the target's last state only.
        level.only("use_aux_hidden_state", True)
    eagle.only("use_input_layernorm_in_first_layer", True)
    eagle.only("use_last_layernorm", True)
    eagle.only("use_mtp_layernorm", False)
    eagle.only("next_layer_regular", True)
    eagle.only("parallel_draft_step", 1)
    eagle.only("parallel_draft_heads_num_layers", 0)


def refuse_other_tensors(names: Iterable[str], config: dict[str, Any], facts: Facts, where: str) -> None:
    """Raises CheckpointError when the tensors are those of another kind of drafter."""
    names = frozenset(names)
    if any(part in name for name in names for part in _LATENT_TENSORS):
        raise CheckpointError(f"{where}: multi-head latent attention (DeepSeek, Kimi) is not supported")
    if "mask_hidden" in names:
        raise CheckpointError(f"{where}: mask_hidden belongs to P-EAGLE (parallel drafting), which is not supported")
    if scales := sorted(
        name for name in names if name.rsplit(".", 1)[-1].endswith(("_scale", "_scale_2", "scale_inv"))
    ):
        raise CheckpointError(f"{where}: {scales[0]}: quantised weights are not supported; export in bf16 or fp16")
    if "fc.kernel" in facts and "layers.0.hidden_norm.scale" not in facts:
        width = config.get("hidden_size")
        fan_in = facts.shapes["fc.kernel"][-1]
        if isinstance(width, int) and fan_in == 2 * width:
            raise CheckpointError(
                f"{where}: an EAGLE-1 or EAGLE-2 head (fc reads {fan_in} = the embedding and one state, there is no "
                "hidden_norm); only EAGLE-3 and EAGLE-3.1 are supported"
            )
