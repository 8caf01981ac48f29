"""The safetensors format: a strict reader of slices, and a writer that streams and never leaves half a file.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and the data
without gaps. The header is checked completely when a file is opened, so that damage is reported with the tensor's name
instead of surfacing as noise in the weights.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from eagle_jax.checkpoint.source import Index, TensorInfo, lookup
from eagle_jax.errors import CheckpointError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library

Entry = tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]


class SafetensorsFile:
    """One .safetensors file.

    Raises (when opened, and again when read after the file changed):
      CheckpointError: the file is truncated or its header is not a valid description of its bytes.
    """

    def __init__(self, path: Path):
        self.path = path
        self.where = str(path)
        self._data_start, self._tensors, self.metadata = _read_header(path)
        self._size = path.stat().st_size

    def keys(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        return lookup(self._tensors, name, self.where)[0]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        info, offset = lookup(self._tensors, name, self.where)
        if 0 in info.shape:
            return np.zeros(info.shape, info.dtype)[index or ()]
        with reading(self.path):
            # Mapping a file that shrank would end the process with SIGBUS instead of an error.
            if self.path.stat().st_size != self._size:
                raise CheckpointError(f"{self.path}: changed while it was being read ({name})")
            # Mapped per read, so that pages read for one tensor do not stay in memory with the next.
            mapped = np.memmap(self.path, np.uint8, "r", self._data_start + offset, (_bytes(info),))
            array = np.array(mapped.view(info.dtype).reshape(info.shape)[index or ()])
        if info.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise CheckpointError(f"{self.path}: {name}: booleans must be stored as 0 or 1; the file is damaged")
        return array


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the operating system's errors into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """The JSON value in a file, refusing repeated keys, whose meaning no two readers agree on."""
    with reading(path):
        raw = path.read_bytes()
    return _parse_json(raw, str(path))


def write_safetensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors one at a time; the file appears under its name only when it is complete and on disk.

    Args:
      path: destination; an existing file is replaced.
      entries: (name, shape, dtype, function returning that array); only one array is held at a time.
      metadata: strings for the header; {"format": "pt"} by default, without which transformers refuses a file.

    Raises:
      CheckpointError: the disk refuses, or an array is not what its entry says. Whatever is raised, KeyboardInterrupt
        included, nothing is left behind and an existing file is unchanged.
    """
    # Wider dtypes first keeps every tensor aligned to its own size, which torch needs to map the file.
    ordered = sorted(entries, key=lambda entry: (-np.dtype(entry[2]).itemsize, entry[0]))
    header: dict[str, Any] = {"__metadata__": dict({"format": "pt"} if metadata is None else metadata)}
    offset = 0
    for name, shape, dtype, _ in ordered:
        if name in header or np.dtype(dtype) not in _NAMES:
            problem = "is given twice" if name in header else f"has dtype {dtype}, which the format cannot hold"
            raise CheckpointError(f"{path}: {name} {problem}")
        info = TensorInfo(tuple(shape), np.dtype(dtype), str(path))
        end = offset + _bytes(info)
        header[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name, shape, dtype, produce in ordered:
                _write_array(file, f"{path}: {name}", produce(), tuple(shape), np.dtype(dtype))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_array(file: BinaryIO, what: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise CheckpointError(f"{what}: expected {dtype} {list(shape)}, got {array.dtype} {list(array.shape)}")
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _bytes(info: TensorInfo) -> int:
    size = info.dtype.itemsize
    for length in info.shape:  # Python integers: a damaged shape must not wrap around
        size *= length
    return size


def _read_header(path: Path) -> tuple[int, dict[str, tuple[TensorInfo, int]], dict[str, str]]:
    with reading(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise CheckpointError(f"{path}: truncated, or not a safetensors file: the header does not fit into it")
            if length > _MAX_HEADER:
                raise CheckpointError(f"{path}: a header of {length} bytes is not plausible; the file is damaged")
            raw = file.read(length)
    header = _parse_json(raw, f"{path}: header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header: expected a JSON object, found {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: header: __metadata__ must be an object of strings")
    tensors = {name: _entry(path, name, value) for name, value in header.items()}
    end = 0
    for name, (info, begin) in sorted(tensors.items(), key=lambda item: (item[1][1], _bytes(item[1][0]))):
        if begin != end:
            problem = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name}: its data {problem}; the file is damaged")
        end = begin + _bytes(info)
    if end != size - 8 - length:
        problem = "truncated" if end > size - 8 - length else "longer than its header says"
        raise CheckpointError(f"{path}: {problem}: {end} bytes of tensors expected, found {size - 8 - length}")
    return 8 + length, tensors, metadata


def _entry(path: Path, name: str, value: Any) -> tuple[TensorInfo, int]:
    where = f"{path}: {name}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets in the header")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(
            f"{where}: dtype {kind!r} is not supported (float32, float16, bfloat16, integers, booleans); quantised "
            "weights must be dequantised first"
        )
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {shape!r} or data_offsets {offsets!r} is malformed")
    info = TensorInfo(tuple(shape), DTYPES[kind], str(path))
    if offsets[1] - offsets[0] != _bytes(info):
        raise CheckpointError(
            f"{where}: {kind} {shape} takes {_bytes(info)} bytes, the header gives it {offsets[1] - offsets[0]}"
        )
    return info, offsets[0]


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _parse_json(raw: bytes, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{where}: {key!r} appears twice")
            found[key] = value
        return found

    try:
        return json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error
