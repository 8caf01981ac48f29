"""Configurations in the Hugging Face form, read key by key: any key that nobody handled is refused by name."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from eagle_jax.config import RotaryConfig
from eagle_jax.errors import ConfigError

Key = str  # the class below has a method of that name


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

    def __contains__(self, key: Key) -> bool:
        return self._values.get(key) is not None

    def fail(self, key: Key, problem: Key) -> ConfigError:
        return ConfigError(f"{self.where}: {key}: {problem}")

    def take(self, key: Key, kinds: tuple[type, ...], default: Any = ...) -> Any:
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

    def int(self, key: Key, default: Any = ...) -> Any:
        return self.take(key, (int,), default)

    def float(self, key: Key, default: Any = ...) -> Any:
        value = self.take(key, (int, float), default)
        if value is default:
            return value
        # JSON readers accept NaN, Infinity and integers of any length.
        if not abs(value) <= sys.float_info.max:
            raise self.fail(key, f"expected a finite number, found {value!r:.20}")
        return float(value)

    def bool(self, key: Key, default: Any = ...) -> Any:
        return self.take(key, (bool,), default)

    def str(self, key: Key, default: Any = ...) -> Any:
        return self.take(key, (str,), default)

    def list(self, key: Key, default: Any = ...) -> Any:
        return self.take(key, (list, tuple), default)

    def child(self, key: Key, default: Any = ...) -> ConfigReader | None:
        """A reader of the nested object under `key`; the caller finishes it."""
        value = self.take(key, (dict,), default)
        return None if value is None else ConfigReader(value, f"{self.where}: {key}")

    def ignore(self, *keys: Key) -> None:
        """Mark keys that change nothing in a forward pass."""
        self._seen.update(keys)

    def only(self, key: Key, *allowed: Any) -> None:
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
    base = default if base is None else base
    if base is None:
        raise reader.fail("rope_theta", "missing")
    return base


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
