"""What the Llama-shaped families share when their Hugging Face configuration is read."""

from __future__ import annotations

from typing import Any

from eagle_jax.config import BlockConfig, TargetConfig
from eagle_jax.config_reader import ConfigReader, read_activation, read_rotary

_MOST_LAYERS = 10_000  # a damaged count must not become a list of that length

# Keys that change nothing in a forward pass.
HARMLESS = (
    "_attn_implementation_autoset",
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "dtype",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "rope_interleaved",
    "sep_token_id",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "use_cache",
)


def read_decoder(
    values: dict[str, Any],
    where: str,
    *,
    family: str,
    qkv_bias: bool,
    qk_norm: bool,
    sliding: bool,
    default_head_dim: int | None = None,
    default_rotary_base: float = 10000.0,
    tied_by_default: bool = False,
) -> TargetConfig:
    """Reads a Hugging Face configuration of a Llama-shaped model.

    Args:
      values: the JSON object.
      where: file name for messages.
      family: key of FAMILIES.
      qkv_bias: default of `attention_bias` for q, k, v when the key is absent.
      qk_norm: the family normalises queries and keys per head.
      sliding: `sliding_window` without `use_sliding_window` or `layer_types` applies to every layer (Mistral).
      default_head_dim: `head_dim` when the key is absent; None is hidden_size / num_attention_heads.
      default_rotary_base: theta when the key is absent.
      tied_by_default: `tie_word_embeddings` when the key is absent.

    Raises:
      ConfigError: a missing, unknown or unsupported key, by name.
    """
    reader = ConfigReader(values, where)
    reader.ignore(*HARMLESS)
    hidden_size, num_heads = reader.int("hidden_size"), reader.int("num_attention_heads")
    num_layers, max_position = reader.int("num_hidden_layers"), reader.int("max_position_embeddings")
    if num_heads < 1 or not 1 <= num_layers <= _MOST_LAYERS:
        raise reader.fail("num_attention_heads, num_hidden_layers", f"{num_heads} and {num_layers} are not plausible")
    if default_head_dim is None:
        if "head_dim" not in reader and hidden_size % num_heads:
            raise reader.fail("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
        default_head_dim = hidden_size // num_heads
    bias = reader.bool("attention_bias", None)
    window, layers = _sliding(reader, num_layers, sliding)
    block = BlockConfig(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=reader.int("num_key_value_heads", num_heads),
        head_dim=reader.int("head_dim", default_head_dim),
        mlp_size=reader.int("intermediate_size"),
        norm_eps=reader.float("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias if bias is None else bias,
        o_bias=bool(bias),
        mlp_bias=reader.bool("mlp_bias", False),
        qk_norm=qk_norm,
        activation=read_activation(reader),
        rotary=read_rotary(reader, default_rotary_base, max_position),
        sliding_window=window,
    )
    eos = reader.take("eos_token_id", (int, list), ())
    config = TargetConfig(
        family=family,
        block=block,
        num_layers=num_layers,
        vocab_size=reader.int("vocab_size"),
        max_position=max_position,
        tied_head=reader.bool("tie_word_embeddings", tied_by_default),
        sliding_layers=layers,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
        bos_token_id=reader.int("bos_token_id", None),
    )
    reader.only("partial_rotary_factor", 1, 1.0)
    reader.only("quantization_config")
    reader.finish()
    return config


def _sliding(reader: ConfigReader, num_layers: int, every_layer: bool) -> tuple[int | None, tuple[bool, ...] | None]:
    """(window, which layers slide) from sliding_window, use_sliding_window, max_window_layers and layer_types."""
    window = reader.int("sliding_window", None)
    in_use = reader.bool("use_sliding_window", every_layer)
    kinds = reader.list("layer_types", None)
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise reader.fail("layer_types", f"{unknown} are not supported (full_attention, sliding_attention)")
        layers = tuple(kind == "sliding_attention" for kind in kinds)
        if any(layers) and window is None:
            raise reader.fail("sliding_window", "missing, though layer_types has sliding layers")
        return (window, layers) if any(layers) else (None, None)
    if window is None or not in_use:
        return None, None
    first = 0 if every_layer else reader.int("max_window_layers", num_layers)
    layers = tuple(i >= first for i in range(num_layers))
    return (window, layers) if any(layers) else (None, None)
