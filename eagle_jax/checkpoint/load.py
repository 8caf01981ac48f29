"""Models by name: find the files, read the configuration, fill the parameters."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.hub import resolve
from eagle_jax.checkpoint.keymap import Piece, check, plan
from eagle_jax.checkpoint.layouts import hf_decoder
from eagle_jax.checkpoint.layouts.base import DRAFT_TO_TARGET
from eagle_jax.checkpoint.place import common_dtype, parameter_shapes, place, with_parameters
from eagle_jax.checkpoint.tensors import TensorSource, open_tensors, read_json
from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.config import DrafterConfig, TargetConfig, check_pair, default_capture_layers
from eagle_jax.drafter.eagle3 import Eagle3Drafter
from eagle_jax.errors import CheckpointError, ConfigError
from eagle_jax.sharding import Placement, check_divides
from eagle_jax.target import read_target_config
from eagle_jax.target.decoder import Decoder

logger = logging.getLogger(__name__)

# What a multimodal wrapper may say at its top level about the text model inside.
_WRAPPER_KEYS = ("tie_word_embeddings", "bos_token_id", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class Target:
    """A target model, ready to run.

    Attributes:
      path: the folder or file it was read from.
      config: what it is.
      model: its parameters, on their devices.
    """

    path: Path
    config: TargetConfig
    model: Decoder

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside (or inside) the weights, read when first asked for."""
        return load_tokenizer(self.path)


def load_target(name: str | Path, *, dtype: Any = None, placement: Placement | None = None) -> Target:
    """Load a target.

    Args:
      name: a folder, a .gguf or weights file, a built-in name, or a hub id.
      dtype: of all parameters; None keeps the one that most of the stored weights have (GGUF: float32).
      placement: where the parameters go; None is the default device.

    Raises:
      InputError: no such model.
      ConfigError: a configuration that is not supported, or a mesh that does not divide the model.
      CheckpointError: files that are damaged or do not fit the configuration.
    """
    path = _weights_path(resolve(name))
    config, source, wrapped = _open_target(path)
    if placement is not None:
        check_divides(config.block, placement, "target")
    hf_decoder.check_sizes(config, source)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    shapes = parameter_shapes(model)

    prefix, head = hf_decoder.find_prefix(source), hf_decoder.find_head(source)
    if prefix != hf_decoder.PREFIXES[0]:
        logger.info("%s: the text model is under %r", source.where, prefix)
    pieces = plan(hf_decoder.rules(prefix, head or hf_decoder.HEADS[0]), shapes)
    ignored = list(hf_decoder.IGNORED)
    if wrapped:  # the other halves of a multimodal model
        names = source.keys()
        ignored += [name for name in names if not name.startswith(prefix) and name != head]
    if config.tied_head and head is not None:
        ignored.append(head)
    check(pieces, source, ignored)
    if config.tied_head and head is not None:
        hf_decoder.check_tied(source, prefix, head)

    kind = common_dtype(source, pieces) if dtype is None else np.dtype(jnp.dtype(dtype))
    arrays = place(source, pieces, shapes, kind, placement, config.block.head_dim)
    return Target(path, config, with_parameters(model, arrays))


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter bound to its target, ready to run.

    Attributes:
      path: the folder it was read from.
      config: what it is, the captured layers filled in.
      model: its parameters, on their devices; tables it does not own are the target's.
      warnings: what a user should know about how the files were read.
    """

    path: Path
    config: DrafterConfig
    model: Eagle3Drafter
    warnings: list[str]


def load_drafter(
    name: str | Path,
    target: Target,
    *,
    dtype: Any = None,
    placement: Placement | None = None,
    layout: str | None = None,
    norm_output_meaning: Literal["feedback", "specforge"] = "feedback",
) -> Drafter:
    """Load a drafter for a target.

    Args:
      name: a folder in any layout of `eagle_jax.checkpoint.layouts`, or a hub id.
      target: the model it drafts for.
      dtype: of all parameters; None is the target's, so that both compute alike.
      placement: where the parameters go; None is the default device.
      layout, norm_output_meaning: see `open_drafter`.

    Raises:
      InputError: no such model.
      ConfigError: a configuration that is not supported, another target's drafter, or a mesh that does not divide it.
      CheckpointError: files that are damaged or do not fit the configuration.
    """
    path = resolve(name)
    checkpoint = open_drafter(path, layout=layout, norm_output_meaning=norm_output_meaning)
    config, warnings = checkpoint.config, list(checkpoint.warnings)
    if config.capture_layers is None:
        if config.num_captured != 3:
            raise ConfigError(f"{path}: names no captured layers, and there is no default for {config.num_captured}")
        config = dataclasses.replace(config, capture_layers=default_capture_layers(target.config.num_layers))
        warnings.append(f"{path}: names no captured layers; taking {list(config.capture_layers or ())}, the usual ones")
    try:
        check_pair(target.config, config)
        if placement is not None and not placement.replicated:
            check_divides(config.block, placement, "drafter")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error

    model = build_drafter(checkpoint, config, dtype=target.model.dtype if dtype is None else dtype, placement=placement)
    model.bind(target.model.embed, target.model.head)
    return Drafter(path, config, model, warnings)


def build_drafter(
    checkpoint: DrafterCheckpoint,
    config: DrafterConfig | None = None,
    *,
    dtype: Any = jnp.float32,
    placement: Placement | None = None,
) -> Eagle3Drafter:
    """The drafter of an opened checkpoint, not yet bound to a target.

    Args:
      config: its configuration where that was completed; None is the checkpoint's own.
      dtype: of all weights.
      placement: where the parameters go; None is the default device.
    """
    config = config or checkpoint.config
    model = nnx.eval_shape(lambda: Eagle3Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    shapes = parameter_shapes(model)
    arrays: dict[str, jax.Array] = {}
    for of_ids in (False, True):  # weights take the model's dtype, the vocabulary table stays integer
        pieces = [Piece(p, shape, p, None, False) for p, shape in shapes.items() if (p == DRAFT_TO_TARGET) == of_ids]
        kind = np.dtype(np.int32) if of_ids else np.dtype(jnp.dtype(dtype))
        arrays |= place(checkpoint, pieces, shapes, kind, placement, config.block.head_dim)
    return with_parameters(model, arrays)


def read_target(name: str | Path) -> TargetConfig:
    """The configuration of a target, without reading weights. Raises as `load_target` does."""
    return _open_target(_weights_path(resolve(name)))[0]


def _weights_path(path: Path) -> Path:
    """`path`, or the one .gguf file in a folder that has no configuration."""
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise CheckpointError(f"{path}: which of {', '.join(file.name for file in found)}? Name one file")
        if not found:
            raise CheckpointError(f"{path}: holds neither a config.json nor a .gguf file")
        return found[0]
    return path


def _open_target(path: Path) -> tuple[TargetConfig, TensorSource, bool]:
    """Configuration, tensors, and whether they belong to a multimodal wrapper."""
    if path.suffix == ".gguf":
        from eagle_jax.checkpoint.gguf import GgufSource, read_config

        source = GgufSource(path)
        return read_target_config(read_config(source), str(path)), source, False
    folder = path if path.is_dir() else path.parent
    where = folder / "config.json"
    if not where.is_file():
        raise CheckpointError(f"{where}: missing; it says what the weights beside it are")
    values = read_json(where)
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(values).__name__}")
    wrapped = "text_config" in values
    if wrapped:
        values = _text_config(values, where)
    config = read_target_config(values, str(where))
    return _with_generation_config(config, folder / "generation_config.json"), open_tensors(path), wrapped


def _text_config(values: dict[str, Any], where: Path) -> dict[str, Any]:
    text = values["text_config"]
    if not isinstance(text, dict):
        raise ConfigError(f"{where}: text_config: expected an object, found {type(text).__name__}")
    outside = {key: values[key] for key in _WRAPPER_KEYS if values.get(key) is not None}
    return outside | text


def _with_generation_config(config: TargetConfig, where: Path) -> TargetConfig:
    """The end tokens that generation_config.json names, which is the file that generation follows."""
    if not where.is_file():
        return config
    values = read_json(where)
    eos = values.get("eos_token_id") if isinstance(values, dict) else None
    if eos is None:
        return config
    ids = eos if isinstance(eos, list) else [eos]
    if not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{where}: eos_token_id: expected a token id or a list of them, found {eos!r}")
    return dataclasses.replace(config, eos_token_ids=tuple(ids))
