"""Records on disk: dicts of arrays, in ArrayRecord shards that are read by random access.

  folder/metadata.json              what the records are, and which shards are complete
  folder/shard-00000.array_record   one record after the other, each the bytes of a safetensors file
  folder/shard-00000.index          small numbers per record (lengths), likewise

A folder appears whole, by a rename; or, written in place, it grows shard by shard and can be read meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.errors import CheckpointError, InputError, first_line

FORMAT = "eagle-jax records"
SCHEMA_VERSION = 1
METADATA = "metadata.json"
_DTYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "BOOL": np.bool_, "F16": np.float16, "F32": np.float32}
_DTYPES |= {"F64": np.float64, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
_DTYPES |= {"U16": np.uint16, "U32": np.uint32, "U64": np.uint64}


def encode_record(record: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file."""
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(array) for name, array in record.items()})


def decode_record(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file; bfloat16 included, which the library's numpy reader refuses."""
    from safetensors import deserialize

    return {
        name: np.frombuffer(info["data"], _DTYPES[info["dtype"]]).reshape(info["shape"])
        for name, info in deserialize(data)
    }


def read_metadata(folder: Path | str) -> dict[str, Any]:
    """metadata.json of a folder of records.

    Raises:
      InputError: there is no such folder or file.
      CheckpointError: it is damaged, of another program, or of another schema version.
    """
    path = Path(folder) / METADATA
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}; expected a folder of records") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not of a folder of records (format must be {FORMAT!r})")
    if value.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: has schema version {value.get('schema_version')!r}, this program reads {SCHEMA_VERSION}: "
            "write the data again"
        )
    return value


def shard_files(folder: Path, number: int) -> tuple[Path, Path]:
    """(records, index) of a shard."""
    return folder / f"shard-{number:05d}.array_record", folder / f"shard-{number:05d}.index"


class RecordWriter:
    """Writes records into a folder; a context manager, which completes the folder unless its body raises.

    Example:
      with RecordWriter(folder, {"kind": "..."}, records_per_shard=4096, index=("length",)) as writer:
          for record in records[len(writer) :]:
              writer.append(record, length=n)
          writer.summary["tokens"] = total

    Args:
      folder: what to write. Until it is complete, a hidden folder beside it is written.
      metadata: what the records are; a folder is only continued by a writer with the same.
      records_per_shard: records of each shard but the last.
      index: names of the numbers given with each record.
      resume: continue what an interrupted writer left, after its last complete shard; `len(writer)` records are there.
      in_place: write `folder` itself, so that a reader can follow; `resume` then applies to it.
      overwrite: replace a complete folder of records.
      compress: by zstd; of little use for hidden states.

    Raises:
      InputError: the folder exists, holds something else, or was begun with other metadata.
      CheckpointError: the disk refuses.
    """

    def __init__(
        self,
        folder: Path | str,
        metadata: Mapping[str, Any],
        *,
        records_per_shard: int = 4096,
        index: Sequence[str] = (),
        resume: bool = False,
        in_place: bool = False,
        overwrite: bool = False,
        compress: bool = True,
    ):
        if records_per_shard < 1:
            raise InputError(f"records_per_shard must be at least 1, found {records_per_shard}")
        self.folder = Path(folder)
        self.summary: dict[str, Any] = {}
        self._options = "group_size:1,zstd:3" if compress else "group_size:1,uncompressed"
        self._per_shard = records_per_shard
        self._metadata = json.loads(json.dumps(dict(metadata)))
        self._index = list(index)
        self._pending: list[list[int]] = []
        self._shards: list[dict[str, int]] = []
        self._writer: Any = None
        self._resume, self._in_place, self._overwrite = resume, in_place, overwrite
        self._work = self.folder if in_place else self.folder.with_name(f".{self.folder.name}.partial")
        try:
            self._begin()
        except OSError as error:
            raise CheckpointError(f"{self._work}: cannot write: {error.strerror or error}") from error

    def _begin(self) -> None:
        if (self.folder / METADATA).exists():
            found = read_metadata(self.folder)
            if not (self._overwrite or (self._in_place and self._resume and not found["complete"])):
                raise InputError(f"{self.folder}: exists already; name another folder, or ask to overwrite it")
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(f"{self.folder}: exists and is no folder of records; it is not overwritten")
        begun = (self._work / METADATA).exists()
        if begun and self._resume:
            self._continue(read_metadata(self._work))
        elif self._work.exists() and (begun or not self._in_place):
            shutil.rmtree(self._work)
        self._work.mkdir(parents=True, exist_ok=True)
        self._write_metadata(complete=False)

    def _continue(self, found: dict[str, Any]) -> None:
        mine = {"metadata": self._metadata, "index": self._index, "records_per_shard": self._per_shard}
        for key, value in mine.items():
            if found.get(key) != value:
                nested = isinstance(value, dict) and isinstance(found.get(key), dict)
                names = sorted(k for k in value if value[k] != found[key].get(k)) if nested else [key]
                raise InputError(
                    f"{self._work}: was begun with other settings ({', '.join(names)}); remove it to restart"
                )
        self._shards = list(found["shards"])
        if self._shards and self._shards[-1]["records"] < self._per_shard:
            self._shards.pop()  # the last shard of a run that ended is written again
        kept = {path for i in range(len(self._shards)) for path in shard_files(self._work, i)} | {self._work / METADATA}
        for path in self._work.iterdir():
            if path not in kept:
                path.unlink()

    def __len__(self) -> int:
        return len(self._shards) * self._per_shard + len(self._pending)

    def append(self, record: Mapping[str, np.ndarray], **index: int) -> None:
        """Adds a record: a name and an array at least, and a number for each name of the index."""
        if sorted(index) != sorted(self._index):
            raise ValueError(f"expected the index {self._index}, got {sorted(index)}")
        path, _ = shard_files(self._work, len(self._shards))
        try:
            if self._writer is None:
                from array_record.python.array_record_module import ArrayRecordWriter

                self._writer = ArrayRecordWriter(str(path), self._options)
            self._writer.write(encode_record(record))
        except RuntimeError as error:
            raise CheckpointError(f"{path}: cannot write: {first_line(error)}") from error
        self._pending.append([index[name] for name in self._index])
        if len(self._pending) == self._per_shard:
            self._end_shard()

    def _end_shard(self) -> None:
        """Closes the shard, reads its length back and makes it known."""
        from array_record.python.array_record_module import ArrayRecordReader

        path, index = shard_files(self._work, len(self._shards))
        try:
            writer, self._writer = self._writer, None
            writer.close()
            found = ArrayRecordReader(str(path)).num_records()
            if found != len(self._pending):
                raise CheckpointError(f"{path}: {len(self._pending)} records were written, {found} can be read")
            columns = np.asarray(self._pending, np.int64).reshape(found, len(self._index)).T
            index.write_bytes(encode_record(dict(zip(self._index, columns, strict=True))))
            _sync(path, index)
            self._shards.append({"records": found, "bytes": path.stat().st_size})
            self._pending = []
            self._write_metadata(complete=False)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: cannot write: {first_line(error)}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error

    def _write_metadata(self, *, complete: bool) -> None:
        value = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "complete": complete,
            "metadata": self._metadata,
            "summary": self.summary,
            "index": self._index,
            "records_per_shard": self._per_shard,
            "records": sum(shard["records"] for shard in self._shards),
            "shards": self._shards,
        }
        partial = self._work / f".{METADATA}"
        partial.write_text(json.dumps(value, indent=1) + "\n")
        _sync(partial)
        os.replace(partial, self._work / METADATA)

    def close(self) -> None:
        """Ends the last shard and gives the folder its name.

        Raises:
          InputError: there is no record.
        """
        if self._pending:
            self._end_shard()
        if not self._shards:
            raise InputError(f"{self.folder}: there is nothing to write into it")
        try:
            self._write_metadata(complete=True)
            if not self._in_place:
                if self.folder.exists():
                    shutil.rmtree(self.folder)
                os.rename(self._work, self.folder)
            _sync(self.folder.parent)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot write: {error.strerror or error}") from error

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
            return
        if self._writer is not None:
            self._writer.close()
        if not self._resume and not self._in_place:
            shutil.rmtree(self._work, ignore_errors=True)


def _sync(*paths: Path) -> None:
    """Makes what was written, or renamed inside a folder, durable."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def concatenated_index(parts: Iterable[dict[str, np.ndarray]], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Per name, the numbers of all shards in order: [N] int64."""
    listed = list(parts)
    return {name: np.concatenate([part[name] for part in listed] or [np.zeros(0, np.int64)]) for name in names}
