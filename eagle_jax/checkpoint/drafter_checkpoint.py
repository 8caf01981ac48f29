"""A drafter on disk, in any layout, behind canonical names: the one reader everything else uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoint import keymap
from eagle_jax.checkpoint.layouts import LAYOUTS, detect
from eagle_jax.checkpoint.layouts.base import (
    DRAFT_TO_TARGET,
    VOCABULARY,
    Facts,
    Layout,
    NormOutputMeaning,
    canonical_path,
    drafter_shapes,
    rules_of,
)
from eagle_jax.checkpoint.layouts.orbax import FORMAT, OrbaxSource
from eagle_jax.checkpoint.layouts.refuse import refuse_other_tensors
from eagle_jax.checkpoint.layouts.vocabulary import check_ids, read_draft_to_target
from eagle_jax.checkpoint.source import Index, MemorySource, TensorInfo, TensorSource, lookup
from eagle_jax.checkpoint.tensors import open_tensors, read_json
from eagle_jax.config import DrafterConfig
from eagle_jax.errors import CheckpointError


class DrafterCheckpoint:
    """A drafter's configuration and its arrays, read when asked for; a TensorSource of canonical paths.

    Linear kernels come out [in, out], `draft_to_target` as absolute target ids [U] int32, everything else in the dtype
    of its file.

    Attributes:
      config: the drafter.
      layout: key of LAYOUTS, or "memory".
      detected_by: why that layout, in words.
      warnings: lines a user should see.
      where: folder, for messages.
    """

    def __init__(
        self,
        config: DrafterConfig,
        source: TensorSource,
        pieces: list[keymap.Piece],
        draft_to_target: np.ndarray | None,
        *,
        layout: str,
        detected_by: str,
        warnings: list[str],
    ):
        self.config = config
        self.where = source.where
        self.layout = layout
        self.detected_by = detected_by
        self.warnings = warnings
        self._source = source
        self._draft_to_target = draft_to_target
        self._shapes = drafter_shapes(config)
        self._pieces: dict[str, list[keymap.Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.path, []).append(piece)
        for found in self._pieces.values():
            if len({source.info(piece.name).dtype for piece in found}) > 1:
                names = keymap.listed([piece.name for piece in found])
                raise CheckpointError(f"{source.where}: {names} must have one dtype")

    @classmethod
    def from_arrays(cls, config: DrafterConfig, arrays: Mapping[str, Any]) -> DrafterCheckpoint:
        """A drafter that is in memory: canonical path -> array (numpy or jax).

        Raises:
          CheckpointError: an array is missing, unknown or misshapen.
        """
        return cls._canonical(config, MemorySource(arrays), layout="memory", detected_by="", warnings=[])

    @classmethod
    def _canonical(cls, config: DrafterConfig, source: TensorSource, **labels: Any) -> DrafterCheckpoint:
        held = Facts(source.where, dict.fromkeys(source.keys(), ())).num_layers
        if held != config.num_layers:
            raise CheckpointError(f"{source.where}: holds {held} blocks, num_layers says {config.num_layers}")
        shapes = drafter_shapes(config)
        ids_shape = shapes.pop(DRAFT_TO_TARGET, None)
        pieces = [keymap.Piece(path, shape, path, None, False) for path, shape in shapes.items()]
        keymap.check(pieces, source, ignore=(DRAFT_TO_TARGET,) if ids_shape else ())
        ids = None
        if ids_shape is not None:
            info = source.info(DRAFT_TO_TARGET)
            if info.shape != ids_shape or info.dtype.kind not in "iu":
                raise CheckpointError(
                    f"{source.where}: {DRAFT_TO_TARGET}: {info.dtype} {list(info.shape)}, expected integers "
                    f"{list(ids_shape)}"
                )
            ids = source.read(DRAFT_TO_TARGET).astype(np.int64)
            check_ids(ids, config.vocab_size, f"{source.where}: {DRAFT_TO_TARGET}")
            ids = ids.astype(np.int32)
        return cls(config, source, pieces, ids, **labels)

    def keys(self) -> list[str]:
        return list(self._shapes)

    def info(self, path: str) -> TensorInfo:
        shape = lookup(self._shapes, path, self.where)
        if path == DRAFT_TO_TARGET:
            return TensorInfo(shape, np.dtype(np.int32), self.where)
        first = self._source.info(self._pieces[path][0].name)
        return TensorInfo(shape, first.dtype, first.file)

    def read(self, path: str, index: Index | None = None) -> np.ndarray:
        """Reads an array, or a slice of it.

        Raises:
          CheckpointError: unknown path, unreadable file, NaN or infinite weights.
        """
        shape = lookup(self._shapes, path, self.where)
        if path == DRAFT_TO_TARGET:
            assert self._draft_to_target is not None
            return self._draft_to_target[index or ()]
        pieces = self._pieces[path]
        if pieces[0].layer is None:
            array = keymap.read_piece(self._source, pieces[0], index)
        else:
            first, rest = (slice(None), None) if index is None else (index[0], index[1:])
            chosen = [pieces[i] for i in range(shape[0])[first]]
            array = np.stack([keymap.read_piece(self._source, piece, rest) for piece in chosen])
        if not keymap.is_finite(array):
            raise keymap.not_finite(self._source, [piece.name for piece in pieces])
        return array

    def stored_names(self, path: str) -> list[str]:
        """The names that `path` has in the files."""
        return ["d2t"] if path == DRAFT_TO_TARGET else [piece.name for piece in self._pieces[path]]

    def with_config(self, **changes: Any) -> DrafterCheckpoint:
        """The same arrays under a configuration that differs where no array depends on it."""
        config = dataclasses.replace(self.config, **changes)
        if drafter_shapes(config) != self._shapes:
            raise CheckpointError(f"{self.where}: {changes} would need other tensors")
        pieces = [piece for found in self._pieces.values() for piece in found]
        return DrafterCheckpoint(
            config,
            self._source,
            pieces,
            self._draft_to_target,
            layout=self.layout,
            detected_by=self.detected_by,
            warnings=self.warnings,
        )


def open_drafter(
    folder: Path | str, *, layout: str | None = None, norm_output_meaning: NormOutputMeaning = "feedback"
) -> DrafterCheckpoint:
    """Opens a drafter's folder; nothing but names, shapes and the vocabulary tables is read.

    Args:
      folder: config.json and weights.
      layout: key of LAYOUTS; None finds out.
      norm_output_meaning: what the file's `norm_output` means, "feedback" unless a SpecForge trainer wrote it that used
        it for the norm before the head ("specforge").

    Raises:
      CheckpointError, ConfigError: anything that does not fit together, by name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    values = read_json(folder / "config.json")
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder / 'config.json'}: expected a JSON object, found {type(values).__name__}")
    if (folder / "hf_quant_config.json").exists():
        raise CheckpointError(f"{folder / 'hf_quant_config.json'}: quantised drafters are not supported")
    if layout is not None and layout not in LAYOUTS:
        raise CheckpointError(f"unknown layout {layout!r} (known: {', '.join(LAYOUTS)})")
    if layout is not None:
        opener, reason = LAYOUTS[layout].open_source, "named by the caller"
    else:
        opener, reason = (OrbaxSource if values.get("format") == FORMAT else open_tensors), ""
    source = opener(folder)
    if layout is None:
        try:
            layout, reason = detect(source.keys(), values)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error
    chosen = LAYOUTS[layout]
    where = str(folder / "config.json")
    if not chosen.canonical:
        return _open_named(chosen, values, source, where, norm_output_meaning, reason)
    config, warnings = chosen.read_config(values, Facts(where, {}), norm_output_meaning)
    return DrafterCheckpoint._canonical(config, source, layout=layout, detected_by=reason, warnings=warnings)


def _open_named(
    layout: Layout,
    values: dict[str, Any],
    source: TensorSource,
    where: str,
    meaning: NormOutputMeaning,
    reason: str,
) -> DrafterCheckpoint:
    table = rules_of(source.keys())
    paths = {name: canonical_path(table, name) for name in source.keys()}  # noqa: SIM118 (not a dict)
    facts = Facts(where, {path: source.info(name).shape for name, path in paths.items() if path is not None})
    refuse_other_tensors(source.keys(), values, facts, source.where)
    config, warnings = layout.read_config(values, facts, meaning)
    shapes = drafter_shapes(config)
    shapes.pop(DRAFT_TO_TARGET, None)
    pieces = keymap.plan(table, shapes)
    mirrored = [name for name, path in paths.items() if path is not None and _is_mirror(path)]
    keymap.check(pieces, source, ignore=(*VOCABULARY, *mirrored))
    for name in mirrored:
        twin = name.replace("hidden_norm", "input_layernorm")
        # Bytes, so that a NaN equals itself; `read` reports it.
        if source.read(name).tobytes() != source.read(twin).tobytes():
            raise CheckpointError(
                f"{source.where}: {name} differs from {twin}: vLLM reads one and SGLang the other, so the file does "
                "not say what this block computes"
            )
    ids = read_draft_to_target(source, config.vocab_size, config.draft_vocab_size)
    return DrafterCheckpoint(config, source, pieces, ids, layout=layout.name, detected_by=reason, warnings=warnings)


def _is_mirror(path: str) -> bool:
    """Whether a path is the `hidden_norm` of a block after the first, which only repeats its input_layernorm."""
    return path.endswith(".hidden_norm.scale") and not path.startswith("layers.0.")
