"""This project's own layout: an Orbax tree of canonical arrays, which restores straight onto a mesh.

The folder holds config.json, {"format": ..., "config": the fields of DrafterConfig}, and `arrays/`, an Orbax checkpoint
of one flat dict, canonical path -> array.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoint.layouts.base import Facts, Layout, NormOutputMeaning
from eagle_jax.checkpoint.source import Index, TensorInfo, lookup
from eagle_jax.checkpoint.tensors import Entry
from eagle_jax.config import BlockConfig, DrafterConfig, RotaryConfig
from eagle_jax.config_reader import ConfigReader
from eagle_jax.errors import CheckpointError, ConfigError, first_line

FORMAT = "eagle_jax_drafter"
ARRAYS = "arrays"


class OrbaxSource:
    """The arrays of a drafter in an Orbax checkpoint. Orbax restores whole arrays, so a slice is cut after reading."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp  # takes a second to import: only when this layout is used

        self._ocp = ocp
        self._folder = (folder / ARRAYS).absolute()
        self.where = str(self._folder)
        if not self._folder.is_dir():
            raise CheckpointError(f"{self.where}: no such folder; the drafter's arrays are missing")
        self._reader = ocp.PyTreeCheckpointer()
        tree = self._guarded("metadata", lambda: self._reader.metadata(self._folder).item_metadata.tree)
        if not isinstance(tree, dict) or not all(hasattr(leaf, "shape") for leaf in tree.values()):
            raise CheckpointError(f"{self.where}: expected one flat dict of arrays")
        self._info = {
            name: TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype), self.where) for name, leaf in tree.items()
        }

    def keys(self) -> list[str]:
        return list(self._info)

    def info(self, name: str) -> TensorInfo:
        return lookup(self._info, name, self.where)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        self.info(name)
        wanted = self._ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: self._ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        array = self._guarded(name, lambda: self._reader.restore(self._folder, args=wanted)[name])
        return array if index is None else array[index]

    def _guarded(self, what: str, action: Any) -> Any:
        try:
            return action()
        except Exception as error:  # Orbax and TensorStore raise many types on damaged files
            reason = first_line(error)
            raise CheckpointError(f"{self.where}: {what}: Orbax cannot read it: {reason}") from error


def save_arrays(folder: Path, entries: Iterable[Entry]) -> None:
    """Writes the arrays; Orbax gathers them in memory, so the drafter must fit there."""
    import orbax.checkpoint as ocp

    path = (folder / ARRAYS).absolute()
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, {name: produce() for name, _, _, produce in entries})
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error


def _read(values: dict[str, Any], facts: Facts, meaning: NormOutputMeaning) -> tuple[DrafterConfig, list[str]]:
    reader = ConfigReader(values, facts.where)
    if reader.str("format") != FORMAT:
        raise reader.fail("format", f"expected {FORMAT!r}")
    reader.only("version", 1)
    child = reader.child("config")
    reader.finish()
    return _dataclass(DrafterConfig, child), []


def _write(config: DrafterConfig, dtype: str, target: str | None) -> dict[str, Any]:
    return {"format": FORMAT, "version": 1, "config": dataclasses.asdict(config)}


_NESTED = {"block": BlockConfig, "rotary": RotaryConfig}


def _dataclass(kind: type, reader: ConfigReader | None) -> Any:
    """The inverse of `dataclasses.asdict`, with the fields' own types as the check."""
    assert reader is not None  # a required child is never None
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in _NESTED:
            fields[field.name] = _dataclass(_NESTED[field.name], reader.child(field.name))
            continue
        choices = typing.get_args(hints[field.name])
        optional = type(None) in choices
        if typing.get_origin(hints[field.name]) is typing.Literal:
            reader.only(field.name, *choices)
            fields[field.name] = reader.str(field.name)
        elif field.name == "capture_layers":
            ids = reader.list(field.name, None)
            if ids is not None and not all(type(i) is int and i >= 0 for i in ids):
                raise reader.fail(field.name, f"{ids}: expected layer numbers, 0 or more")
            fields[field.name] = None if ids is None else tuple(ids)
        else:
            take = {int: reader.int, float: reader.float, bool: reader.bool}
            base = next(choice for choice in (*choices, hints[field.name]) if choice in take)
            fields[field.name] = take[base](field.name, None) if optional else take[base](field.name)
    reader.finish()
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ConfigError(f"{reader.where}: {error}") from error


LAYOUT = Layout(
    name="orbax",
    title="this project's Orbax tree",
    read_config=_read,
    write_config=_write,
    canonical=True,
    open_source=OrbaxSource,
    save=save_arrays,
)
