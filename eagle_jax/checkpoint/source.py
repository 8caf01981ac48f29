"""What every reader of tensors is, whatever the file format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol, TypeVar

import numpy as np

from eagle_jax.errors import CheckpointError

Index = tuple[slice, ...]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, and the file that holds it (for messages)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str


class TensorSource(Protocol):
    """A set of named tensors of which any slice can be read without reading the rest.

    An index has one slice per axis; None reads the whole tensor.
    """

    where: str

    def keys(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray: ...


class MemorySource:
    """Arrays that are in memory already, behind the same interface as files."""

    def __init__(self, arrays: Mapping[str, np.ndarray], where: str = "memory"):
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.where = where

    def keys(self) -> list[str]:
        return list(self._arrays)

    def info(self, name: str) -> TensorInfo:
        array = lookup(self._arrays, name, self.where)
        return TensorInfo(array.shape, array.dtype, self.where)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        array = lookup(self._arrays, name, self.where)
        return array if index is None else array[index]


def lookup(table: Mapping[str, T], name: str, where: str) -> T:
    """`table[name]`, or a CheckpointError that says where the tensor is missing."""
    if name not in table:
        raise CheckpointError(f"{where}: no tensor named {name!r}")
    return table[name]
