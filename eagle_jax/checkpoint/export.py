"""Writing a drafter: into a folder beside the destination, read back and compared, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from eagle_jax.checkpoint import keymap
from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.layouts import LAYOUTS, WRITABLE
from eagle_jax.checkpoint.layouts.base import DRAFT_TO_TARGET, Layout, drafter_shapes
from eagle_jax.checkpoint.layouts.vocabulary import membership, offsets
from eagle_jax.checkpoint.safetensors_file import sync_folder
from eagle_jax.checkpoint.tensors import Entry
from eagle_jax.errors import CheckpointError, ConfigError

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def export_drafter(
    drafter: DrafterCheckpoint,
    destination: Path | str,
    layout: str,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    target: str | None = None,
) -> list[str]:
    """Writes a drafter's folder in a layout; it appears under its name only when it has been read back and compared.

    Args:
      drafter: from `open_drafter` or `DrafterCheckpoint.from_arrays`.
      destination: a folder that does not exist or is empty.
      layout: one of WRITABLE.
      dtype: float32, float16 or bfloat16; None keeps every tensor's own.
      overwrite: replace a destination that holds another drafter.
      target: name of the target model, which speculators' layout records.

    Returns:
      Warnings: what readers of that layout will ignore.

    Raises:
      ConfigError: the layout cannot say what the drafter is.
      CheckpointError: the destination is taken, a weight does not fit the dtype, or the disk refuses. Whatever is
        raised, KeyboardInterrupt included, the destination is as it was (or, at the very end, completely new), and
        nothing is left beside it.
    """
    destination = Path(destination)
    if layout not in WRITABLE:
        raise CheckpointError(f"cannot write layout {layout!r} (writable: {', '.join(WRITABLE)})")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported ({', '.join(DTYPES)})")
    chosen = LAYOUTS[layout]
    if problems := chosen.cannot_store(drafter.config):
        raise ConfigError(f"the {layout} layout's readers cannot run {', '.join(problems)}; write another layout")
    cast = None if dtype is None else DTYPES[dtype]
    stored = cast or drafter.info("fc.kernel").dtype
    assert chosen.write_config is not None
    values = chosen.write_config(drafter.config, stored.name, target)
    with _replacing(destination, overwrite) as folder:
        chosen.save(folder, _entries(drafter, chosen, cast))
        _write_json(folder / "config.json", values)
        _compare(drafter, folder, layout, cast)
    return chosen.write_warnings(drafter.config)


def _entries(drafter: DrafterCheckpoint, layout: Layout, cast: np.dtype | None) -> list[Entry]:
    config = drafter.config
    shapes = drafter_shapes(config)
    ids_shape = shapes.pop(DRAFT_TO_TARGET, None)
    if layout.canonical:
        pieces = [keymap.Piece(path, shape, path, None, False) for path, shape in shapes.items()]
    else:
        pieces = keymap.plan(layout.write_rules(config), shapes)
    entries = [_entry(drafter, piece, piece.name, cast) for piece in pieces]
    if layout.mirror_norms:
        for piece in pieces:
            if piece.path.endswith(".input_layernorm.scale") and not piece.path.startswith("layers.0."):
                twin = piece.name.replace("input_layernorm", "hidden_norm")
                entries.append(_entry(drafter, piece, twin, cast))
    if ids_shape is not None:
        ids = drafter.read(DRAFT_TO_TARGET)
        if layout.canonical:
            entries.append(_held(DRAFT_TO_TARGET, ids))
        else:
            entries += [_held("d2t", offsets(ids)), _held("t2d", membership(ids, config.vocab_size))]
    return entries


def _entry(drafter: DrafterCheckpoint, piece: keymap.Piece, name: str, cast: np.dtype | None) -> Entry:
    def produce() -> np.ndarray:
        array = _read_cast(drafter, piece.path, piece.layer, cast)
        return array.T if piece.transpose else array

    return name, piece.shape, cast or drafter.info(piece.path).dtype, produce


def _held(name: str, array: np.ndarray) -> Entry:
    return name, array.shape, array.dtype, lambda: array


def _read_cast(drafter: DrafterCheckpoint, path: str, layer: int | None, cast: np.dtype | None) -> np.ndarray:
    array = drafter.read(path) if layer is None else drafter.read(path, (slice(layer, layer + 1),))[0]
    if cast is None or path == DRAFT_TO_TARGET or array.dtype == cast:
        return array
    with np.errstate(over="ignore"):
        array = array.astype(cast)
    if not keymap.is_finite(array):
        raise CheckpointError(
            f"{drafter.where}: {path}: holds values beyond the range of {cast.name}; keep a wider dtype"
        )
    return array


def _compare(drafter: DrafterCheckpoint, folder: Path, layout: str, cast: np.dtype | None) -> None:
    """Raises CheckpointError unless the folder reads back as the drafter, bit by bit."""
    written = open_drafter(folder, layout=layout)
    if written.config != drafter.config:
        raise CheckpointError(f"the {layout} layout reads back as {written.config}, not {drafter.config}")
    for path in drafter.keys():  # noqa: SIM118 (not a dict)
        wanted, found = _read_cast(drafter, path, None, cast), written.read(path)
        if wanted.dtype != found.dtype or wanted.tobytes() != found.tobytes():
            raise CheckpointError(
                f"{folder}: {path}: reads back differently from what was written; is the disk failing?"
            )


def _write_json(path: Path, values: dict) -> None:
    try:
        with path.open("w") as file:
            json.dump(values, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error


@contextlib.contextmanager
def _replacing(destination: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside `destination` that takes its name if the body succeeds and vanishes if not."""
    occupied = destination.exists() and (not destination.is_dir() or any(destination.iterdir()))
    if occupied and not overwrite:
        raise CheckpointError(f"{destination}: exists already; name another folder, or ask to overwrite it")
    if occupied and not (destination / "config.json").is_file():
        raise CheckpointError(f"{destination}: holds no config.json, so it is not a drafter; it is not overwritten")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=destination.parent))
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot write: {error.strerror or error}") from error
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        yield new
        try:
            if occupied:
                os.rename(destination, old)
            os.rename(new, destination)
        except BaseException:
            if old.exists() and not destination.exists():
                os.rename(old, destination)
            raise
        sync_folder(destination.parent)
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot write: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
