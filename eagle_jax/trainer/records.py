"""What a run leaves for people and programs: metrics as JSON lines and TensorBoard, curves, the recipe as used."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import yaml

from eagle_jax.errors import InputError
from eagle_jax.trainer.config import TrainConfig

METRICS = "metrics.jsonl"


class MetricsFile:
    """Appends one JSON object per line; a resumed run drops the lines behind its checkpoint.

    TensorBoard gets the same figures where tensorboardX is installed.
    """

    def __init__(self, folder: Path, first_step: int):
        self.path = folder / METRICS
        kept = [line for line in _lines(self.path) if line["step"] <= first_step]
        try:
            with self.path.open("w") as file:
                file.writelines(json.dumps(line) + "\n" for line in kept)
            self._file = self.path.open("a")
        except OSError as error:
            raise InputError(f"{self.path}: cannot write: {error.strerror or error}") from error
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            self._board = None
        else:
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        """Adds a line: kind "train" or "evaluate"; lists are figures by TTT step."""
        self._file.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for name, value in figures.items():
            for k, number in enumerate(value if isinstance(value, list) else [value]):
                tag = f"{kind}/{name}/{k}" if isinstance(value, list) else f"{kind}/{name}"
                self._board.add_scalar(tag, number, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a last one cut short by a kill is dropped."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            break
    return found


def write_recipe(folder: Path, config: TrainConfig, data: dict[str, Any]) -> None:
    """config.yaml as used, and run.json: versions, machine, fingerprints of the data."""
    libraries = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "eagle-jax")
    versions = {name: importlib.metadata.version(name) for name in libraries}
    about = {"versions": versions, "python": platform.python_version(), "machine": platform.machine(), "data": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    (folder / "run.json").write_text(json.dumps(about, indent=1) + "\n")


def plot_curves(folder: Path) -> Path | None:
    """curves.png: loss and acceptance by TTT step, simulated acceptance length; None without any metrics."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = _lines(folder / METRICS)
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "evaluate"]
    if not train:
        return None
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    steps = [line["step"] for line in train]
    for axis, name, title in ((axes[0], "loss", "loss by TTT step"), (axes[1], "acceptance", "acceptance by TTT step")):
        for k in range(len(train[0][name])):
            axis.plot(steps, [line[name][k] for line in train], label=f"step {k}", linewidth=1)
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize="small")
    for curve, label, style in ((train, "training", "-"), (held_out, "held out", "o-")):
        values = [line["simulated_acceptance_length"] for line in curve]
        axes[2].plot([line["step"] for line in curve], values, style, label=label, linewidth=1)
    decoded = [line for line in held_out if "decoded_acceptance_length" in line]
    if decoded:
        values = [line["decoded_acceptance_length"] for line in decoded]
        axes[2].plot([line["step"] for line in decoded], values, "s--", label="held out, decoded", linewidth=1)
    axes[2].set(title="acceptance length", xlabel="step")
    axes[2].legend(fontsize="small")
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
