"""Named tensors in files, read slice by slice; the one door to every file format.

`open_tensors` finds the files of a folder; `write_safetensors` writes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from eagle_jax.checkpoint.safetensors_file import Entry, SafetensorsFile, read_json, write_safetensors
from eagle_jax.checkpoint.source import Index, MemorySource, TensorInfo, TensorSource, lookup
from eagle_jax.checkpoint.torch_file import TorchFile
from eagle_jax.errors import CheckpointError

__all__ = ["Entry", "MemorySource", "TensorInfo", "TensorSource", "open_tensors", "read_json", "write_safetensors"]

_OPENERS: dict[str, Callable[[Path], TensorSource]] = {
    ".safetensors": SafetensorsFile,
    ".bin": TorchFile,
    ".pt": TorchFile,
    ".pth": TorchFile,
}
# In this order; a folder often holds the same weights in both formats.
_PREFERRED = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_PATTERNS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin")


def open_tensors(path: Path | str) -> TensorSource:
    """The tensors of a folder, of an index of shards, or of one file.

    Args:
      path: a folder, *.safetensors, *.index.json, or a PyTorch file (*.bin, *.pt, *.pth; needs torch).

    Raises:
      CheckpointError: there is nothing to read, several files could be meant, a shard is missing, or a file is damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = _find(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    if path.suffix not in _OPENERS:
        raise CheckpointError(f"{path}: unknown kind of file (known: {', '.join(_OPENERS)}, .index.json)")
    return _OPENERS[path.suffix](path)


class ShardedSource:
    """Several files behind one set of names.

    Args:
      shards: file name -> source.
      where: the index file or folder, for messages.

    Raises:
      CheckpointError: two shards hold a tensor of the same name.
    """

    def __init__(self, shards: Mapping[str, TensorSource], where: str):
        self.where = where
        self._owner: dict[str, TensorSource] = {}
        for file, shard in shards.items():
            for name in list(shard.keys()):
                if name in self._owner:
                    raise CheckpointError(f"{where}: {name} is in {self._owner[name].where} and again in {file}")
                self._owner[name] = shard

    def keys(self) -> list[str]:
        return list(self._owner)

    def info(self, name: str) -> TensorInfo:
        return lookup(self._owner, name, self.where).info(name)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        return lookup(self._owner, name, self.where).read(name, index)


def _find(folder: Path) -> Path:
    for name in _PREFERRED:
        if (folder / name).is_file():
            return folder / name
    for pattern in _PATTERNS:
        found = sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise CheckpointError(f"{folder}: which of {names}? Name one file, or add an index")
        if found:
            return found[0]
    raise CheckpointError(f"{folder}: holds no weights (model.safetensors, an index of shards, or pytorch_model.bin)")


def _open_shards(index: Path) -> TensorSource:
    content = read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{index}: weight_map must be an object of tensor name -> file name")
    files = sorted(set(table.values()))
    if outside := [file for file in files if Path(file).name != file or Path(file).suffix not in _OPENERS]:
        raise CheckpointError(f"{index}: {', '.join(outside)}: shards must be weight files in the index's own folder")
    if missing := [file for file in files if not (index.parent / file).is_file()]:
        raise CheckpointError(f"{index}: missing shards: {', '.join(missing)}")
    shards = {file: _OPENERS[Path(file).suffix](index.parent / file) for file in files}
    for file, shard in shards.items():
        held = set(shard.keys())
        if absent := sorted(name for name, owner in table.items() if owner == file and name not in held):
            raise CheckpointError(f"{index}: {', '.join(absent[:8])}: named by the index, absent from {file}")
    return ShardedSource(shards, str(index))
