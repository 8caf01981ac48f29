"""A checkpoint layout as a table: each stored name beside the canonical path it fills.

The table is read in both directions. Loading asks which stored names a model needs and compares that with what the
files hold; writing asks the same question and produces the names. Both are strict: `check` gathers every missing,
unknown and misshapen tensor and raises once.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from eagle_jax.checkpoint.tensors import TensorSource
from eagle_jax.errors import CheckpointError

INDEX = "{i}"
FLOAT_DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
_SHOWN = 8  # names of one kind in an error message


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a layout.

    Attributes:
      source: stored name; `{i}` stands for a number.
      target: canonical path; `{i}` stands for the same number, unless `stacked`.
      transpose: the stored matrix is [out, in] and the canonical one [in, out].
      stacked: the number in `source` indexes the leading axis of the canonical array.
    """

    source: str
    target: str
    transpose: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        if (INDEX in self.source) != (INDEX in self.target or self.stacked):
            raise ValueError(f"{self}: {INDEX} must stand on both sides, or on the stored side of a stacked rule")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One stored tensor and its place in the model.

    Attributes:
      name: stored name.
      shape: stored shape.
      path: canonical path.
      layer: index on the leading axis of the canonical array, or None when the tensor is the whole array.
      transpose: the canonical orientation swaps the two axes.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    layer: int | None
    transpose: bool


def plan(rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]]) -> list[Piece]:
    """The stored tensors that a model of these canonical shapes consists of, in the order of `shapes`.

    Raises ValueError when a path matches no rule or several: the table is wrong, not the user's file.
    """
    compiled = [(re.compile(re.escape(rule.target).replace(re.escape(INDEX), r"(\d+)")), rule) for rule in rules]
    pieces = []
    for path, shape in shapes.items():
        matches = [(match, rule) for pattern, rule in compiled if (match := pattern.fullmatch(path))]
        if len(matches) != 1:
            raise ValueError(f"{path} matches {len(matches)} rules of the layout, expected 1")
        match, rule = matches[0]
        stored = shape[1:] if rule.stacked else shape
        if rule.transpose:
            stored = stored[::-1]
        if rule.stacked:
            for layer in range(shape[0]):
                pieces.append(Piece(rule.source.replace(INDEX, str(layer)), stored, path, layer, rule.transpose))
        else:
            number = match.group(1) if match.groups() else ""
            pieces.append(Piece(rule.source.replace(INDEX, number), stored, path, None, rule.transpose))
    return pieces


def check(pieces: Sequence[Piece], source: TensorSource, ignore: Iterable[str] = ()) -> None:
    """Compare what a model needs with what the files hold.

    Args:
      pieces: from `plan`.
      source: the files.
      ignore: patterns (fnmatch) of stored names that carry no parameter of the model.

    Raises:
      CheckpointError: naming every missing, unknown or misshapen tensor and every one that is not floating point.
    """
    ignore = tuple(ignore)
    stored = set(source.keys())
    needed = {piece.name for piece in pieces}
    unknown = sorted(n for n in stored - needed if not any(fnmatch.fnmatchcase(n, pattern) for pattern in ignore))
    problems = []
    if missing := [piece.name for piece in pieces if piece.name not in stored]:
        problems.append(f"missing: {listed(missing)}")
    if unknown:
        problems.append(f"unknown: {listed(unknown)}")
    wrong, unreadable = [], []
    for piece in pieces:
        if piece.name not in stored:
            continue
        info = source.info(piece.name)
        if tuple(info.shape) != piece.shape:
            wrong.append(f"{piece.name} is {list(info.shape)}, the configuration wants {list(piece.shape)}")
        if info.dtype not in FLOAT_DTYPES:
            unreadable.append(f"{piece.name} is {info.dtype}")
    if wrong:
        problems.append(f"wrong shape: {listed(wrong)}")
    if unreadable:
        problems.append(f"not float32, float16 or bfloat16: {listed(unreadable)}")
    if problems:
        raise CheckpointError(f"{source.where}: tensors do not fit the configuration; " + "; ".join(problems))


def read_piece(source: TensorSource, piece: Piece, index: tuple[slice, ...] | None = None) -> np.ndarray:
    """Read a tensor, or a slice of it, in the canonical orientation.

    Args:
      source: the files.
      piece: which tensor.
      index: slices of the canonical array without its layer axis; None reads all of it.
    """
    if not piece.transpose:
        return source.read(piece.name, index)
    return source.read(piece.name, None if index is None else index[::-1]).T


def not_finite(source: TensorSource, names: Sequence[str]) -> CheckpointError:
    """The error for tensors that hold NaN or infinity."""
    files = sorted({source.info(name).file for name in names})
    return CheckpointError(f"{', '.join(files)}: NaN or infinite weights in {listed(names)}; the file is damaged")


def is_finite(array: np.ndarray) -> bool:
    """Whether every element is finite, without a float copy of a 16-bit array."""
    if array.dtype.itemsize != 2 or array.dtype not in FLOAT_DTYPES:
        return bool(np.isfinite(array).all())
    exponent = np.uint16(0x7C00 if array.dtype == np.float16 else 0x7F80)
    return not bool(((array.view(np.uint16) & exponent) == exponent).any())


def listed(names: Sequence[str]) -> str:
    """Names for a message, cut short."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
