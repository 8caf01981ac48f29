"""PyTorch's pickled files (.bin, .pt): read through torch with `weights_only`, so that nothing in them is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.checkpoint.safetensors_file import reading
from eagle_jax.checkpoint.source import Index, TensorInfo, lookup
from eagle_jax.errors import CheckpointError, first_line


class TorchFile:
    """A flat state dict in a file written by `torch.save`.

    Raises:
      CheckpointError: torch is not installed, or the file is damaged or holds anything but named tensors.
    """

    def __init__(self, path: Path):
        try:
            import torch
        except ImportError as error:
            raise CheckpointError(
                f"{path}: reading PyTorch files needs torch: pip install 'eagle-jax[convert]'"
            ) from error
        self.where = str(path)
        dtypes = {
            torch.float64: np.float64,
            torch.float32: np.float32,
            torch.float16: np.float16,
            torch.bfloat16: ml_dtypes.bfloat16,
            torch.int64: np.int64,
            torch.int32: np.int32,
            torch.int16: np.int16,
            torch.int8: np.int8,
            torch.uint8: np.uint8,
            torch.bool: np.bool_,
        }
        self._bits = torch.int16  # bfloat16 crosses to numpy as its bits
        state = _load(torch, path)
        self._tensors: dict[str, Any] = {}
        self._info: dict[str, TensorInfo] = {}
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"{path}: {name!r} is {type(tensor).__name__}: expected a flat dict of tensors")
            if tensor.dtype not in dtypes or tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(f"{path}: {name}: {tensor.dtype} ({tensor.layout}) is not supported")
            self._tensors[name] = tensor
            self._info[name] = TensorInfo(tuple(tensor.shape), np.dtype(dtypes[tensor.dtype]), self.where)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        return lookup(self._info, name, self.where)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        tensor, dtype = lookup(self._tensors, name, self.where), self.info(name).dtype
        tensor = tensor.detach()[index or ()].contiguous()
        if dtype == ml_dtypes.bfloat16:
            return tensor.view(self._bits).numpy().view(dtype)
        return tensor.numpy()


def _load(torch: Any, path: Path) -> dict[Any, Any]:
    with reading(path), path.open("rb") as file:
        zipped = file.read(2) == b"PK"  # the older form cannot be mapped
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch raises many types on damaged or refused pickles
        reason = first_line(error)
        raise CheckpointError(f"{path}: torch cannot read it with weights_only: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds {type(state).__name__}, expected a dict of tensors")
    return state
