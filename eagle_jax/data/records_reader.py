"""Reading folders of records by random access. See `records_file` for their form."""

from __future__ import annotations

import operator
import threading
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from eagle_jax.data.records_file import METADATA, concatenated_index, decode_record, read_metadata, shard_files
from eagle_jax.errors import CheckpointError, first_line

_OPEN_SHARDS = 64


class RecordReader:
    """Records of a folder by number: `len(reader)`, `reader[i]` -> dict of arrays. A data source as grain takes it.

    Threads may share a reader, and processes may be sent one.

    Args:
      folder: as `RecordWriter` leaves it.
      growing: also accept a folder that is still being written in place; `refresh` then finds what was added.

    Attributes:
      metadata: what the writer was given; summary: what it added at the end.
      index: name -> [N] int64, small numbers per record.

    Raises:
      InputError: no such folder.
      CheckpointError: incomplete, damaged, of another schema; a shard that is missing or has another size.
    """

    def __init__(self, folder: Path | str, *, growing: bool = False):
        self.folder = Path(folder)
        self._growing = growing
        self._lock = threading.Lock()
        self._open: dict[int, Any] = {}
        self._records_per_shard: list[int] = []
        self.index: dict[str, np.ndarray] = {}
        self.refresh()

    def refresh(self) -> None:
        """Reads metadata.json again."""
        found = read_metadata(self.folder)
        self.metadata: dict[str, Any] = found["metadata"]
        self.summary: dict[str, Any] = found["summary"]
        self.complete: bool = found["complete"]
        if not (self.complete or self._growing):
            raise CheckpointError(f"{self.folder}: is not complete: whoever wrote it was stopped, or is still at it")
        known, shards = len(self._records_per_shard), found["shards"]
        parts = [self.index] if known else []
        for i in range(known, len(shards)):
            path, index = shard_files(self.folder, i)
            try:
                size = path.stat().st_size
                part = decode_record(index.read_bytes())
            except OSError as error:
                raise CheckpointError(
                    f"{error.filename}: cannot read: {error.strerror}; {METADATA} lists it"
                ) from error
            except Exception as error:  # safetensors has its own kinds
                raise CheckpointError(f"{index}: is damaged: {first_line(error)}") from error
            if size != shards[i]["bytes"]:
                raise CheckpointError(f"{path}: has {size} bytes, {shards[i]['bytes']} were written: it is damaged")
            if sorted(part) != sorted(found["index"]) or any(len(p) != shards[i]["records"] for p in part.values()):
                raise CheckpointError(f"{index}: does not belong to its shard")
            parts.append(part)
        self.index = concatenated_index(parts, found["index"])
        self._records_per_shard = [shard["records"] for shard in shards]
        self._ends = np.cumsum([0, *self._records_per_shard])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: SupportsIndex) -> dict[str, np.ndarray]:
        i = operator.index(key)
        if not 0 <= i < len(self):
            raise IndexError(f"{self.folder}: record {i} of {len(self)}")
        shard = int(np.searchsorted(self._ends, i, side="right")) - 1
        path, _ = shard_files(self.folder, shard)
        try:
            with self._lock:
                (data,) = self._reader(shard, path).read([i - int(self._ends[shard])])
            return decode_record(data)
        except Exception as error:  # RuntimeError of ArrayRecord, and safetensors' own kind
            raise CheckpointError(f"{path}: record {i} cannot be read: {first_line(error)}") from error

    def _reader(self, shard: int, path: Path) -> Any:
        if shard not in self._open:
            from array_record.python.array_record_module import ArrayRecordReader

            if len(self._open) >= _OPEN_SHARDS:
                self._open.pop(next(iter(self._open))).close()
            self._open[shard] = ArrayRecordReader(str(path), "readahead_buffer_size:0")
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    def __repr__(self) -> str:
        return f"RecordReader({str(self.folder)!r}, {len(self)} records)"
