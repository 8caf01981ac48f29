"""What a target, a drafter and a decoding run are: frozen records, and the strict reader that fills them.

Every number a layer needs is a field here without a default, so that no layer can invent one. Configurations in the
Hugging Face form are read through `ConfigReader`, which refuses, by name, any key that nobody handled.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any, Literal

from eagle_jax.errors import ConfigError

RotaryKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding. Fields of another kind than `kind` are None.

    Attributes:
      kind: the frequency schedule.
      base: theta.
      factor: how far the context was stretched (linear, llama3, yarn).
      original_max_position: the context length before stretching (llama3, yarn).
      low_freq_factor, high_freq_factor: wavelength borders (llama3).
      beta_fast, beta_slow: rotations at the borders of the ramp (yarn).
      attention_factor: factor on cos and sin; None derives it as the YaRN paper does (yarn).
      mscale, mscale_all_dim: DeepSeek's form of the same factor (yarn).
      truncate: round the ramp's borders to whole dimensions (yarn).
    """

    kind: RotaryKind
    base: float
    factor: float | None = None
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("base", "factor", "original_max_position", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"rotary {name} must be positive, found {value}")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One decoder block, as the target and the drafter both build it.

    Attributes:
      hidden_size: width of the residual stream (D or H).
      num_heads, num_kv_heads, head_dim: N, K, h. head_dim is explicit, never hidden_size / num_heads.
      mlp_size: F.
      norm_eps: epsilon of every RMSNorm.
      qkv_bias, o_bias, mlp_bias: whether these projections add a bias.
      qk_norm: RMSNorm over each head's query and key (Qwen3).
      activation: gate activation of the MLP.
      rotary: the position embedding.
      sliding_window: a query sees at most this many positions, itself included; None sees all.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    activation: Literal["silu", "gelu", "gelu_tanh"]
    rotary: RotaryConfig
    sliding_window: int | None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size"):
            _require_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")
        if self.sliding_window is not None:
            _require_positive("sliding_window", self.sliding_window)


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A target model.

    Attributes:
      family: key of `eagle_jax.target.FAMILIES`.
      block: what every block looks like.
      num_layers: L.
      vocab_size: V.
      max_position: the longest context the model was made for.
      tied_head: the head is the embedding table.
      sliding_layers: per layer, whether `block.sliding_window` applies; None when no layer slides.
      eos_token_ids: ids that end a text (empty when the files name none).
      bos_token_id: id that starts a text, or None.
    """

    family: str
    block: BlockConfig
    num_layers: int
    vocab_size: int
    max_position: int
    tied_head: bool
    sliding_layers: tuple[bool, ...] | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        for name in ("num_layers", "vocab_size", "max_position"):
            _require_positive(name, getattr(self, name))
        if self.sliding_layers is not None and len(self.sliding_layers) != self.num_layers:
            raise ConfigError(
                f"sliding_layers names {len(self.sliding_layers)} layers, the model has {self.num_layers}"
            )


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE-3 or EAGLE-3.1 drafter.

    Attributes:
      block: what every drafter block looks like (block 0 reads 2H, the others H).
      num_layers: number of drafter blocks.
      target_hidden_size: D, width of one captured state.
      vocab_size: V, the target's vocabulary.
      draft_vocab_size: U; U < V needs a draft-to-target table.
      max_position: the longest context the drafter was trained for (a hint: longer contexts run).
      capture_layers: ids of the captured boundaries in this project's numbering (id i = the residual stream entering
        block i, 0 = embeddings, L = after the last block); None when the files do not say.
      num_captured: A.
      fc_norm: one RMSNorm per captured state before `fc` (EAGLE-3.1).
      norm_before_fc: one RMSNorm over the concatenated states before `fc`.
      norm_output: the state fed to the next draft step is the normed one (EAGLE-3.1); else the raw one (EAGLE-3).
      norm_before_residual: the first block's residual is the normed feature.
      fc_bias: `fc` adds a bias.
      own_embedding, own_head: the files carry the table; otherwise it is the target's.
    """

    block: BlockConfig
    num_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position: int
    capture_layers: tuple[int, ...] | None
    num_captured: int
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    fc_bias: bool
    own_embedding: bool
    own_head: bool

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "target_hidden_size",
            "vocab_size",
            "draft_vocab_size",
            "max_position",
            "num_captured",
        ):
            _require_positive(name, getattr(self, name))
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("fc_norm and norm_before_fc exclude each other: one norm per state, or one over all")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size ({self.draft_vocab_size}) exceeds vocab_size ({self.vocab_size})")
        if self.capture_layers is not None and len(self.capture_layers) != self.num_captured:
            raise ConfigError(
                f"capture_layers {list(self.capture_layers)} names {len(self.capture_layers)} layers, "
                f"num_captured is {self.num_captured}"
            )
        if not self.own_head and self.draft_vocab_size != self.vocab_size:
            raise ConfigError(
                f"a draft vocabulary of {self.draft_vocab_size} (the target's has {self.vocab_size}) needs the "
                "drafter's own lm_head: the target's cannot be borrowed"
            )
        if not self.own_embedding and self.block.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"a drafter of width {self.block.hidden_size} needs its own embed_tokens: the target's has width "
                f"{self.target_hidden_size}"
            )
        if not self.own_head and self.block.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"a drafter of width {self.block.hidden_size} needs its own lm_head: the target's has width "
                f"{self.target_hidden_size}"
            )

    @property
    def full_vocabulary(self) -> bool:
        return self.draft_vocab_size == self.vocab_size


def default_capture_layers(num_layers: int) -> tuple[int, int, int]:
    """The three boundaries every public EAGLE-3 project captures by default (2, L//2, L-3)."""
    return (2, num_layers // 2, num_layers - 3)


def check_capture_layers(ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Return `ids` as a tuple, or raise ConfigError when they collide, are unsorted or leave [0, num_layers]."""
    ids = tuple(ids)
    outside = [i for i in ids if not 0 <= i <= num_layers]
    if outside:
        raise ConfigError(f"captured layers {outside} leave [0, {num_layers}] (0 = embeddings, {num_layers} = last)")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"captured layers {list(ids)} collide: each boundary can be captured once")
    if list(ids) != sorted(ids):
        raise ConfigError(f"captured layers {list(ids)} must ascend: fc's columns are ordered low to high")
    return ids


class ConfigReader:
    """Reads a JSON object key by key and refuses what nobody asked for.

    Example:
      reader = ConfigReader(json_object, where="path/config.json")
      size = reader.int("hidden_size")
      reader.ignore("torch_dtype", "transformers_version")
      reader.finish()        # raises ConfigError naming every key left over
    """

    def __init__(self, values: dict[str, Any], where: str):
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(values).__name__}")
        self._values = values
        self._seen: set[str] = set()
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def fail(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key}: {problem}")

    def take(self, key: str, kinds: tuple[type, ...], default: Any = ...) -> Any:
        """Value of `key`; null and absent mean `default`, and without a default they are an error."""
        self._seen.add(key)
        value = self._values.get(key)
        if value is None:
            if default is ...:
                raise self.fail(key, "missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise self.fail(key, f"expected {wanted}, found {value!r}")
        return value

    def int(self, key: str, default: Any = ...) -> Any:
        return self.take(key, (int,), default)

    def float(self, key: str, default: Any = ...) -> Any:
        value = self.take(key, (int, float), default)
        if value is default:
            return value
        # JSON readers accept NaN, Infinity and integers of any length.
        if not abs(value) <= sys.float_info.max:
            raise self.fail(key, f"expected a finite number, found {value!r:.20}")
        return float(value)

    def bool(self, key: str, default: Any = ...) -> Any:
        return self.take(key, (bool,), default)

    def str(self, key: str, default: Any = ...) -> Any:
        return self.take(key, (str,), default)

    def list(self, key: str, default: Any = ...) -> Any:
        return self.take(key, (list, tuple), default)

    def child(self, key: str, default: Any = ...) -> ConfigReader | None:
        """A reader of the nested object under `key`; the caller finishes it."""
        value = self.take(key, (dict,), default)
        return None if value is None else ConfigReader(value, f"{self.where}: {key}")

    def ignore(self, *keys: str) -> None:
        """Mark keys that change nothing in a forward pass."""
        self._seen.update(keys)

    def only(self, key: str, *allowed: Any) -> None:
        """Accept `key` only when absent, null, or one of `allowed`: any other value asks for what is not built."""
        self._seen.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise self.fail(key, f"{value!r} is not supported (supported: {', '.join(map(repr, allowed)) or 'absent'})")

    def finish(self) -> None:
        left = sorted(set(self._values) - self._seen)
        if left:
            raise ConfigError(f"{self.where}: unknown keys {left}: nobody handles them, so they could change the model")


def read_rotary(reader: ConfigReader, default_base: float | None, max_position: int) -> RotaryConfig:
    """Read `rope_theta` + `rope_scaling`, or the newer `rope_parameters`.

    Args:
      reader: at the level where the keys live.
      default_base: theta when no key gives one; None makes it required.
      max_position: `max_position_embeddings`, yarn's original length when the file gives none.
    """
    base = reader.float("rope_theta", None)
    rotary = None
    for key in ("rope_parameters", "rope_scaling"):
        child = reader.child(key, None)
        if child is None:
            continue
        outer = base if base is not None or rotary is None else rotary.base
        parsed = _read_rotary_object(child, outer, default_base, max_position)
        if rotary is not None and parsed != rotary:
            raise reader.fail(key, "differs from rope_parameters; keep one of them")
        rotary = parsed
    if rotary is None:
        return RotaryConfig(kind="default", base=_rotary_base(reader, base, default_base))
    if base is not None and rotary.base != base:
        raise reader.fail("rope_theta", f"{base:g} differs from the nested {rotary.base:g}; keep one of them")
    return rotary


def _rotary_base(reader: ConfigReader, base: float | None, default: float | None) -> float:
    if base is None and default is None:
        raise reader.fail("rope_theta", "missing")
    return default if base is None else base


def _read_rotary_object(
    nested: ConfigReader, base: float | None, default_base: float | None, max_position: int
) -> RotaryConfig:
    base = _rotary_base(nested, nested.float("rope_theta", base), default_base)
    # The type field decides, not the presence of an object: newer files always carry one.
    kind = nested.str("rope_type", None) or nested.str("type", "default")
    nested.ignore("type", "rope_type")
    nested.only("partial_rotary_factor", 1, 1.0)
    if kind == "default":
        nested.ignore("factor")
        rotary = RotaryConfig(kind="default", base=base)
    elif kind == "linear":
        rotary = RotaryConfig(kind="linear", base=base, factor=nested.float("factor"))
    elif kind == "llama3":
        rotary = RotaryConfig(
            kind="llama3",
            base=base,
            factor=nested.float("factor"),
            original_max_position=nested.int("original_max_position_embeddings"),
            low_freq_factor=nested.float("low_freq_factor"),
            high_freq_factor=nested.float("high_freq_factor"),
        )
    elif kind == "yarn":
        rotary = RotaryConfig(
            kind="yarn",
            base=base,
            factor=nested.float("factor"),
            original_max_position=nested.int("original_max_position_embeddings", max_position),
            beta_fast=nested.float("beta_fast", 32.0),
            beta_slow=nested.float("beta_slow", 1.0),
            attention_factor=nested.float("attention_factor", None),
            mscale=nested.float("mscale", None),
            mscale_all_dim=nested.float("mscale_all_dim", None),
            truncate=nested.bool("truncate", True),
        )
    else:
        raise nested.fail("rope_type", f"{kind!r} is not supported (default, linear, llama3, yarn)")
    nested.finish()
    return rotary


def write_rotary(rotary: RotaryConfig) -> tuple[float, dict[str, Any] | None]:
    """The inverse of `read_rotary` in the older form: (rope_theta, rope_scaling or None)."""
    if rotary.kind == "default":
        return rotary.base, None
    names = {"original_max_position": "original_max_position_embeddings"}
    scaling: dict[str, Any] = {"rope_type": rotary.kind}
    for field in dataclasses.fields(rotary):
        value = getattr(rotary, field.name)
        if field.name not in ("kind", "base", "truncate") and value is not None:
            scaling[names.get(field.name, field.name)] = value
    if rotary.kind == "yarn" and not rotary.truncate:
        scaling["truncate"] = False
    return rotary.base, scaling


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_activation(reader: ConfigReader) -> Any:
    name = reader.str("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise reader.fail("hidden_act", f"{name!r} is not supported ({', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def _require_positive(name: str, value: int) -> None:
    if value <= 0:
        raise ConfigError(f"{name} must be positive, found {value}")
