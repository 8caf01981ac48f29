"""The GGUF container: metadata and tensor records, every length checked against the file before it is used.

The `gguf` package names the types and block sizes. Its own reader trusts the lengths in a file, so that a damaged one
can keep it busy for ever.
"""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from eagle_jax.checkpoint.safetensors_file import reading
from eagle_jax.errors import CheckpointError

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SCALARS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One stored tensor.

    Attributes:
      shape: as HF orders it (rows first), in elements.
      kind: how its elements are encoded.
      offset: of its first byte in the file.
      row_bytes: bytes of one run along the last axis.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        count = 1
        for length in self.shape[:-1]:
            count *= length
        return count


class GgufFile:
    """Metadata and tensor records of one .gguf file; tensor bytes are read on request.

    Raises:
      CheckpointError: not a GGUF file, a version or type that is not supported, or damage.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with reading(path), path.open("rb") as file:
            cursor = _Cursor(file, path)
            try:
                self._read(cursor)
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path}: a name or string is not UTF-8; the file is damaged") from error

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Raw bytes of rows [start, stop): uint8 [stop - start, row_bytes]."""
        tensor = self.tensors[name]
        with reading(self.path):
            raw = np.fromfile(
                self.path, np.uint8, (stop - start) * tensor.row_bytes, offset=tensor.offset + start * tensor.row_bytes
            )
        if raw.size != (stop - start) * tensor.row_bytes:
            raise CheckpointError(f"{self.path}: truncated while it was being read ({name})")
        return raw.reshape(stop - start, tensor.row_bytes)

    def _read(self, cursor: _Cursor) -> None:
        if cursor.bytes(4, "the signature") != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (its first bytes are not 'GGUF')")
        version = cursor.number("I", "the version")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not supported (2 and 3 are, in little-endian order)"
            )
        num_tensors = cursor.number("Q", "the tensor count")
        num_keys = cursor.number("Q", "the metadata count")
        for _ in range(cursor.plausible(num_keys, 13, "metadata keys")):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise CheckpointError(f"{self.path}: metadata key {key!r} appears twice; the file is damaged")
            self.metadata[key] = _read_value(cursor, _value_kind(cursor, key), key)
        records = [_read_record(cursor) for _ in range(cursor.plausible(num_tensors, 24, "tensors"))]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment: {alignment!r} is not a power of two")
        start = -(-cursor.position // alignment) * alignment
        end = 0
        for name, shape, kind, offset in records:
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name} appears twice; the file is damaged")
            if offset != end:
                raise CheckpointError(f"{self.path}: {name}: starts at byte {offset} of the data, expected {end}")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise CheckpointError(
                    f"{self.path}: {name}: rows of {shape[-1]} elements cannot be {kind.name} blocks of {block}"
                )
            tensor = GgufTensor(shape, kind, start + offset, shape[-1] // block * block_bytes)
            size = tensor.rows * tensor.row_bytes
            if tensor.offset + size > cursor.size:
                raise CheckpointError(
                    f"{self.path}: truncated: {name} ends at byte {tensor.offset + size}, the file has {cursor.size}"
                )
            self.tensors[name] = tensor
            end = -(-(offset + size) // alignment) * alignment


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path
        self.size = path.stat().st_size
        self.position = 0

    def bytes(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise CheckpointError(f"{self._path}: truncated or damaged: {what} does not fit into the file")
        self.position += count
        return self._file.read(count)

    def number(self, code: str, what: str) -> int:
        (value,) = struct.unpack("<" + code, self.bytes(struct.calcsize(code), what))
        return value

    def string(self, what: str) -> str:
        return self.bytes(self.number("Q", what), what).decode()

    def plausible(self, count: int, smallest: int, what: str) -> int:
        """`count`, unless that many items of at least `smallest` bytes cannot be left in the file."""
        if count * smallest > self.size - self.position:
            raise CheckpointError(f"{self._path}: truncated or damaged: {count} {what} do not fit into the file")
        return count

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}")


def _value_kind(cursor: _Cursor, key: str) -> GGUFValueType:
    code = cursor.number("I", f"the type of {key}")
    try:
        return GGUFValueType(code)
    except ValueError:
        raise cursor.fail(f"{key}: unknown type {code}; the file is damaged") from None


def _read_value(cursor: _Cursor, kind: GGUFValueType, key: str) -> Any:
    """A scalar, a string, or a list of either."""
    if kind in _SCALARS:
        return np.frombuffer(cursor.bytes(_SCALARS[kind].itemsize, key), _SCALARS[kind])[0].item()
    if kind == GGUFValueType.STRING:
        return cursor.string(key)
    item = _value_kind(cursor, key)
    count = cursor.number("Q", key)
    if item in _SCALARS:
        size = cursor.plausible(count, _SCALARS[item].itemsize, f"items of {key}") * _SCALARS[item].itemsize
        return np.frombuffer(cursor.bytes(size, key), _SCALARS[item]).tolist()
    if item == GGUFValueType.STRING:
        return [cursor.string(key) for _ in range(cursor.plausible(count, 8, f"items of {key}"))]
    raise cursor.fail(f"{key}: arrays of arrays are not supported")


def _read_record(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string("a tensor name")
    count = cursor.number("I", name)
    if not 1 <= count <= _MAX_DIMENSIONS:
        raise cursor.fail(f"{name}: {count} dimensions are not plausible; the file is damaged")
    shape = tuple(cursor.number("Q", name) for _ in range(count))[::-1]
    if 0 in shape:
        raise cursor.fail(f"{name}: shape {list(shape)} holds nothing; the file is damaged")
    code = cursor.number("I", name)
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise cursor.fail(
            f"{name}: unknown encoding {code}; the file is damaged or newer than the gguf package"
        ) from None
    return name, shape, kind, cursor.number("Q", name)
