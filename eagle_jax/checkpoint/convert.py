"""What an engineer does with drafter folders: convert them, look into them, compare them.

Each function returns a record whose `to_json` is stable; the command line prints them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.checkpoint.layouts import LAYOUTS
from eagle_jax.checkpoint.layouts.base import NormOutputMeaning
from eagle_jax.errors import ConfigError


class _Report:
    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """One array of a drafter.

    Attributes:
      path: canonical path.
      stored: its names in the files.
      shape: canonical shape.
      dtype: as stored.
      file: where it lies.
    """

    path: str
    stored: list[str]
    shape: list[int]
    dtype: str
    file: str


@dataclasses.dataclass(frozen=True)
class InspectReport(_Report):
    """What a drafter is.

    Attributes:
      source: the folder.
      layout, layout_title, detected_by: how it is stored and what gave it away.
      kind: "eagle3.1" with `fc_norm` and `norm_output`, "eagle3" with neither, else the two switches spelled out.
      config: the fields of DrafterConfig.
      captured_inputs: captured layers counted as block inputs (this project, vLLM, speculators); None when not stored.
      captured_outputs: the same layers counted as block outputs (SpecForge, SGLang, ...); None as well when one of them
        is the embeddings.
      tensors: every array.
      parameters: number of weights, the vocabulary table not counted.
      bytes: size of the arrays.
      warnings: what a user should know.
    """

    source: str
    layout: str
    layout_title: str
    detected_by: str
    kind: str
    config: dict[str, Any]
    captured_inputs: list[int] | None
    captured_outputs: list[int] | None
    tensors: list[TensorReport]
    parameters: int
    bytes: int
    warnings: list[str]


@dataclasses.dataclass(frozen=True)
class ConvertReport(_Report):
    """What `convert` did.

    Attributes:
      source, destination: folders.
      source_layout, layout: from which layout to which.
      dtype: the dtype asked for, or None when every tensor kept its own.
      tensors, parameters: how many.
      warnings: about the source, and about what readers of the destination will ignore.
    """

    source: str
    source_layout: str
    destination: str
    layout: str
    dtype: str | None
    tensors: int
    parameters: int
    warnings: list[str]


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """One array of two drafters.

    Attributes:
      path: canonical path.
      status: "equal" is bit for bit, dtype included; "dtype" has equal values in another dtype.
      max_abs: largest absolute difference, where both have the same shape.
      detail: shapes or dtypes that differ.
    """

    path: str
    status: Literal["equal", "dtype", "different", "shape", "only_in_a", "only_in_b"]
    max_abs: float | None
    detail: str


@dataclasses.dataclass(frozen=True)
class DiffReport(_Report):
    """How two drafters differ, after both are read into the canonical form.

    Attributes:
      a, b: folders.
      equal: nothing differs.
      config: field -> [value in a, value in b], for the fields that differ; nested fields are joined by '.'.
      tensors: every array of either.
    """

    a: str
    b: str
    equal: bool
    config: dict[str, list[Any]]
    tensors: list[TensorDifference]


def convert(
    source: Path | str,
    destination: Path | str,
    layout: str,
    *,
    dtype: str | None = None,
    source_layout: str | None = None,
    norm_output_meaning: NormOutputMeaning = "feedback",
    capture_layers: tuple[int, ...] | None = None,
    target: str | None = None,
    overwrite: bool = False,
) -> ConvertReport:
    """Converts a drafter's folder into another layout.

    Args:
      source, destination: folders.
      layout: the layout to write (`layouts.WRITABLE`).
      dtype: float32, float16 or bfloat16; None keeps every tensor's own.
      source_layout: the layout to read; None finds out.
      norm_output_meaning: see `open_drafter`.
      capture_layers: boundaries (block inputs) to write instead of the source's.
      target: name of the target model, which speculators' layout records.
      overwrite: replace a destination that holds another drafter.

    Raises:
      CheckpointError, ConfigError: see `open_drafter` and `export_drafter`.
    """
    drafter = open_drafter(source, layout=source_layout, norm_output_meaning=norm_output_meaning)
    if capture_layers is not None:
        if min(capture_layers, default=0) < 0 or list(capture_layers) != sorted(set(capture_layers)):
            raise ConfigError(f"capture_layers {list(capture_layers)}: must ascend from 0 or more without repeats")
        drafter = drafter.with_config(capture_layers=capture_layers)
    notes = export_drafter(drafter, destination, layout, dtype=dtype, overwrite=overwrite, target=target)
    return ConvertReport(
        source=str(source),
        source_layout=drafter.layout,
        destination=str(destination),
        layout=layout,
        dtype=dtype,
        tensors=len(drafter.keys()),
        parameters=_parameters(drafter),
        warnings=[*drafter.warnings, *notes],
    )


def inspect(
    source: Path | str, *, layout: str | None = None, norm_output_meaning: NormOutputMeaning = "feedback"
) -> InspectReport:
    """Says what a drafter is; every weight is read once, so that damage shows.

    Raises:
      CheckpointError, ConfigError: see `open_drafter`; NaN or infinite weights.
    """
    drafter = open_drafter(source, layout=layout, norm_output_meaning=norm_output_meaning)
    config, tensors, size = drafter.config, [], 0
    for path in drafter.keys():  # noqa: SIM118 (not a dict)
        info = drafter.info(path)
        size += drafter.read(path).nbytes
        tensors.append(TensorReport(path, drafter.stored_names(path), list(info.shape), info.dtype.name, info.file))
    ids = config.capture_layers
    switches = {name: getattr(config, name) for name in ("fc_norm", "norm_output")}
    kinds = {(True, True): "eagle3.1", (False, False): "eagle3"}
    spelled = "eagle3 with " + " and ".join(name for name, on in switches.items() if on)
    return InspectReport(
        source=str(source),
        layout=drafter.layout,
        layout_title=LAYOUTS[drafter.layout].title,
        detected_by=drafter.detected_by,
        kind=kinds.get(tuple(switches.values()), spelled),
        config=dataclasses.asdict(config),
        captured_inputs=None if ids is None else list(ids),
        captured_outputs=None if ids is None or 0 in ids else [i - 1 for i in ids],
        tensors=tensors,
        parameters=_parameters(drafter),
        bytes=size,
        warnings=drafter.warnings,
    )


def diff(a: Path | str, b: Path | str, *, norm_output_meaning: NormOutputMeaning = "feedback") -> DiffReport:
    """Compares two drafters array by array, whatever their layouts.

    Raises:
      CheckpointError, ConfigError: one of them cannot be read.
    """
    left = open_drafter(a, norm_output_meaning=norm_output_meaning)
    right = open_drafter(b, norm_output_meaning=norm_output_meaning)
    flat_left, flat_right = _flatten(left.config), _flatten(right.config)
    config = {key: [flat_left[key], flat_right[key]] for key in flat_left if flat_left[key] != flat_right[key]}
    paths = list(dict.fromkeys([*left.keys(), *right.keys()]))
    tensors = [_difference(left, right, path) for path in paths]
    equal = not config and all(tensor.status == "equal" for tensor in tensors)
    return DiffReport(str(a), str(b), equal, config, tensors)


def _difference(left: DrafterCheckpoint, right: DrafterCheckpoint, path: str) -> TensorDifference:
    in_left, in_right = path in left.keys(), path in right.keys()  # noqa: SIM118 (not dicts)
    if not (in_left and in_right):
        return TensorDifference(path, "only_in_a" if in_left else "only_in_b", None, "")
    a, b = left.read(path), right.read(path)
    if a.shape != b.shape:
        return TensorDifference(path, "shape", None, f"{list(a.shape)} and {list(b.shape)}")
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return TensorDifference(path, "equal", 0.0, "")
    largest = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))
    detail = f"{a.dtype.name} and {b.dtype.name}" if a.dtype != b.dtype else ""
    return TensorDifference(path, "dtype" if detail and largest == 0.0 else "different", largest, detail)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item, name = getattr(value, field.name), prefix + field.name
        flat |= _flatten(item, f"{name}.") if dataclasses.is_dataclass(item) else {name: item}
    return flat


def _parameters(drafter: DrafterCheckpoint) -> int:
    infos = (drafter.info(path) for path in drafter.keys())  # noqa: SIM118 (not a dict)
    return sum(int(np.prod(info.shape)) for info in infos if info.dtype.kind not in "iu")
