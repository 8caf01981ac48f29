"""Named tensors in files, read slice by slice."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, and the file that holds it (for messages)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str


class TensorSource(Protocol):
    """A set of named tensors of which any slice can be read without reading the rest."""

    where: str

    def keys(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray: ...
