"""The flat `config.json` that all layouts but speculators' share: Llama fields plus EAGLE-3 switches.

Every switch is written explicitly, because readers disagree about the defaults; when it is absent on reading, the
layout's own default applies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle_jax.checkpoint.layouts.base import Facts, NormOutputMeaning
from eagle_jax.checkpoint.layouts.capture import captured_both, captured_nested, read_captured
from eagle_jax.checkpoint.layouts.refuse import refuse_other_methods
from eagle_jax.config import BlockConfig, DrafterConfig
from eagle_jax.config_reader import ConfigReader, read_activation, read_rotary, write_rotary
from eagle_jax.errors import CheckpointError, ConfigError

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "eagle3")
ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

# Keys that change nothing in a drafter's forward pass.
HARMLESS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


@dataclasses.dataclass(frozen=True)
class Flat:
    """How one project's flat configuration differs from the others'.

    Attributes:
      extra_harmless: more keys that change nothing.
      needs_draft_vocab_size: `draft_vocab_size` must be there; else it defaults to `vocab_size`.
      layers_from_file: `num_hidden_layers` is the target's, so that the tensors say how many blocks there are.
      nested_may_be_shifted: ids under `eagle_config` may already be in the top level's numbering.
    """

    extra_harmless: tuple[str, ...] = ()
    needs_draft_vocab_size: bool = False
    layers_from_file: bool = False
    nested_may_be_shifted: bool = False


def read_flat(
    values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning, flat: Flat
) -> tuple[DrafterConfig, list[str]]:
    """Reads a flat configuration.

    Raises:
      ConfigError: a missing, unknown or unsupported key, by name.
    """
    reader = ConfigReader(values, facts.where)
    reader.ignore(*HARMLESS, *flat.extra_harmless)
    eagle = reader.child("eagle_config", None) or ConfigReader({}, f"{facts.where}: eagle_config")
    refuse_other_methods(reader, eagle, facts)
    warnings: list[str] = []
    num_layers = reader.int("num_hidden_layers", 1)
    if flat.layers_from_file:
        num_layers = facts.num_layers
    ids = read_captured(reader, eagle, flat.nested_may_be_shifted, warnings)
    vocab_size = reader.int("vocab_size")
    norm_before_fc = reader.bool("norm_before_fc", False)
    fields: dict[str, Any] = {
        "block": read_block(reader, facts, num_layers),
        "num_layers": num_layers,
        "target_hidden_size": reader.int("target_hidden_size", reader.int("hidden_size")),
        "vocab_size": vocab_size,
        "draft_vocab_size": reader.int("draft_vocab_size", ... if flat.needs_draft_vocab_size else vocab_size),
        "max_position": reader.int("max_position_embeddings", 2048),
        "capture_layers": ids,
        "num_captured": _num_captured(reader, ids),
        "fc_norm": reader.bool("fc_norm", False),
        # vLLM lets the nested value win.
        "norm_before_fc": eagle.bool("norm_before_fc", norm_before_fc),
        "norm_output": read_norm_output(reader, meaning),
        "norm_before_residual": reader.bool("norm_before_residual", False),
    }
    bias = reader.bool("bias", None)  # SGLang's name for fc's bias
    if bias is not None and bias != ("fc.bias" in facts):
        raise reader.fail("bias", f"{bias}, but the file {'lacks' if bias else 'holds'} fc.bias")
    check_tied(reader, facts)
    eagle.finish()
    reader.finish()
    return finish_config(fields, facts), warnings


def finish_config(fields: dict[str, Any], facts: Facts) -> DrafterConfig:
    """Adds what only the tensors say, and names the file in the errors of the combination."""
    for flag, path, name in (
        ("fc_norm", "fc_norm.scale", "fc_norm.*"),
        ("norm_before_fc", "input_norm.scale", "input_norm"),
    ):
        if path in facts and not fields[flag]:
            raise ConfigError(f"{facts.where}: {flag}: false or absent, but the file holds {name}.weight")
    if fields["num_layers"] != facts.num_layers:
        raise ConfigError(
            f"{facts.where}: num_hidden_layers: {fields['num_layers']}, but the file holds {facts.num_layers} blocks"
        )
    width, fan_in = fields["block"].hidden_size, fields["num_captured"] * fields["target_hidden_size"]
    if "fc.kernel" not in facts:
        raise CheckpointError(f"{facts.where}: fc.weight is missing from the tensors beside it")
    if (fc := facts.shapes["fc.kernel"]) != (width, fan_in):
        raise ConfigError(
            f"{facts.where}: fc.weight is {list(fc)}; {fields['num_captured']} captured states of width "
            f"{fields['target_hidden_size']} and hidden_size {width} want {[width, fan_in]}"
        )
    try:
        return DrafterConfig(
            **fields,
            fc_bias="fc.bias" in facts,
            own_embedding="embed.weight" in facts,
            own_head="lm_head.weight" in facts,
        )
    except ConfigError as error:
        raise ConfigError(f"{facts.where}: {error}") from error


def read_block(reader: ConfigReader, facts: Facts, num_layers: int) -> BlockConfig:
    """The Llama fields of a drafter block; whether a projection has a bias is read off the file."""
    hidden_size, num_heads = reader.int("hidden_size"), reader.int("num_attention_heads")
    if "head_dim" not in reader and (num_heads <= 0 or hidden_size % num_heads):
        raise reader.fail("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    qkv_bias, o_bias = f"{attention}q_proj.bias" in facts, f"{attention}o_proj.bias" in facts
    mlp_bias, qk_norm = f"{mlp}gate_proj.bias" in facts, f"{attention}q_norm.scale" in facts
    for key, held in (("attention_bias", qkv_bias or o_bias), ("mlp_bias", mlp_bias)):
        said = reader.bool(key, None)
        if said is not None and said != held:
            raise reader.fail(key, f"{said}, but the file {'holds' if held else 'lacks'} the biases")
    kind = reader.str("model_type", "llama")
    if kind not in MODEL_TYPES:
        raise reader.fail("model_type", f"{kind!r} is not supported ({', '.join(MODEL_TYPES)})")
    reader.only("partial_rotary_factor", 1, 1.0)
    fields = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": reader.int("num_key_value_heads", num_heads),
        "head_dim": reader.int("head_dim", hidden_size // max(num_heads, 1)),
        "mlp_size": reader.int("intermediate_size"),
        "norm_eps": reader.float("rms_norm_eps", 1e-6),
        "qkv_bias": qkv_bias,
        "o_bias": o_bias,
        "mlp_bias": mlp_bias,
        "qk_norm": qk_norm,
        "activation": read_activation(reader),
        "rotary": read_rotary(reader, 10000.0, reader.int("max_position_embeddings", 2048)),
        "sliding_window": _read_window(reader, num_layers),
    }
    if fields["num_kv_heads"] <= 0:
        raise reader.fail("num_key_value_heads", f"{fields['num_kv_heads']} must be positive")
    try:
        return BlockConfig(**fields)
    except ConfigError as error:
        raise ConfigError(f"{reader.where}: {error}") from error


def read_norm_output(reader: ConfigReader, meaning: NormOutputMeaning) -> bool:
    """Whether the normed state is fed back."""
    value = reader.bool("norm_output", None)
    if meaning == "feedback":
        return bool(value)
    if value is False:
        raise reader.fail(
            "norm_output",
            "false means, with SpecForge's meaning, that the head reads the state without the norm; no server does",
        )
    return False


def check_tied(reader: ConfigReader, facts: Facts) -> None:
    """`tie_word_embeddings` is often copied from the target; it only matters when the drafter has no head."""
    tied = reader.bool("tie_word_embeddings", False)
    if tied and "embed.weight" in facts and "lm_head.weight" not in facts:
        raise reader.fail("tie_word_embeddings", "true is not supported: store the head as lm_head.weight")


def _num_captured(reader: ConfigReader, ids: tuple[int, ...] | None) -> int:
    by_name = {key: reader.int(key) for key in ("num_aux_hidden_states", "num_aux_layers") if key in reader}
    reader.ignore("num_aux_hidden_states", "num_aux_layers")
    if len(set(by_name.values())) > 1:
        raise reader.fail("num_aux_layers", f"differs from num_aux_hidden_states ({by_name})")
    return next(iter(by_name.values()), len(ids) if ids else 3)


def _read_window(reader: ConfigReader, num_layers: int) -> int | None:
    window, in_use = reader.int("sliding_window", None), reader.bool("use_sliding_window", None)
    first, kinds = reader.int("max_window_layers", None), reader.list("layer_types", None)
    if kinds is not None:
        if len(kinds) != num_layers:
            raise reader.fail("layer_types", f"names {len(kinds)} layers, the drafter has {num_layers}")
        if not all(kind == kinds[0] for kind in kinds) or kinds[0] not in ("full_attention", "sliding_attention"):
            raise reader.fail("layer_types", f"{kinds}: all full_attention or all sliding_attention is supported")
        if kinds[0] == "full_attention":
            return None
        if window is None:
            raise reader.fail("sliding_window", "missing, though layer_types says sliding_attention")
        return window
    if window is None or in_use is False:
        return None
    if in_use and first is not None:
        if first >= num_layers:
            return None
        if first == 0:
            return window
    raise reader.fail("sliding_window", f"{window}, but layer_types does not say which layers use it")


def write_block(config: DrafterConfig) -> dict[str, Any]:
    """The Llama fields of a drafter."""
    block = config.block
    theta, scaling = write_rotary(block.rotary)
    values: dict[str, Any] = {
        "model_type": "qwen3" if block.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": ACTIVATION_NAMES[block.activation],
        "rms_norm_eps": block.norm_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": block.qkv_bias or block.o_bias,
        "mlp_bias": block.mlp_bias,
        "tie_word_embeddings": False,
    }
    if block.sliding_window is not None:
        # A Qwen3 configuration drops the window unless all of these say the same.
        values["sliding_window"] = block.sliding_window
        values["use_sliding_window"] = True
        values["max_window_layers"] = 0
        values["layer_types"] = ["sliding_attention"] * config.num_layers
    return values


def write_flags(config: DrafterConfig) -> dict[str, Any]:
    """The EAGLE-3 switches, each explicit."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def write_flat(config: DrafterConfig, architecture: str, dtype: str, *, nested_ids: bool = False) -> dict[str, Any]:
    """The inverse of `read_flat`.

    Args:
      config: the drafter.
      architecture: the class name that the layout's readers know.
      dtype: name of the weights' dtype.
      nested_ids: a reader of the layout only looks at the ids under `eagle_config`.

    Raises:
      ConfigError: `nested_ids`, and a captured boundary has no name there.
    """
    captured = captured_nested(config.capture_layers) if nested_ids else captured_both(config.capture_layers)
    return {
        "architectures": [architecture],
        **write_block(config),
        "torch_dtype": dtype,
        **write_flags(config),
        "num_aux_hidden_states": config.num_captured,
        **captured,
    }
