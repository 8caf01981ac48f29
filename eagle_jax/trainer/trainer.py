"""The loop: steps, metrics that are fetched late, evaluation, checkpoints, and a clean end whenever it comes."""

from __future__ import annotations

import collections
import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.checkpoint.train_state import TrainCheckpoints, like
from eagle_jax.errors import EagleJaxError, InputError
from eagle_jax.generation import Generator
from eagle_jax.sharding import ROWS
from eagle_jax.trainer.batch import Batch
from eagle_jax.trainer.losses import metrics
from eagle_jax.trainer.records import MetricsFile, plot_curves, write_recipe
from eagle_jax.trainer.setup import Setup
from eagle_jax.trainer.step import StepReport, TrainState

LATE = 2  # steps in flight before a step's figures are fetched


class TrainingError(EagleJaxError):
    """Training cannot go on."""


class Rows(Protocol):
    """Batches of packed rows for this host: dicts of `tokens`, `mask`, `documents`, `positions`, each [rows, T].

    `get_state` returns JSON; after `set_state` with it the same batches follow.
    """

    def __next__(self) -> dict[str, np.ndarray]: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What a run is evaluated on: packed rows, and prompts for the real decode loop."""

    batches: list[dict[str, np.ndarray]]
    prompts: list[list[int]]
    max_new_tokens: int = 64


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      step: steps taken in all; finished: false when a signal ended it, after saving.
      figures: of the last evaluation; exported: folders written.
    """

    step: int
    finished: bool
    figures: dict[str, Any]
    exported: list[Path]


class Trainer:
    """Runs a recipe from its latest checkpoint to its last step.

    Args:
      setup: from `prepare`.
      rows: where batches come from; a step takes `data.accumulate` of them.
      held_out: what it is evaluated on, or None.
      console: for progress.
    """

    def __init__(self, setup: Setup, rows: Rows, held_out: HeldOut | None, console: Console):
        self._setup, self._rows, self._held_out, self._console = setup, rows, held_out, console
        self._folder = setup.config.run
        self._generator: Generator | None = None
        self._count = jax.jit(setup.step.evaluate)  # compiled once for all evaluations
        self._stop = threading.Event()

    def run(self, data: dict[str, Any] | None = None) -> Outcome:
        """Trains.

        Args:
          data: fingerprints of the data, for the run's record.

        Raises:
          TrainingError: a loss or gradient that is not finite; nothing is saved after it.
          CheckpointError, ConfigError, InputError: as their sources; what was saved before stays.
        """
        setup, config = self._setup, self._setup.config
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_recipe(self._folder, config, data or {})
        except OSError as error:
            raise InputError(f"{self._folder}: cannot write: {error.strerror or error}") from error
        checkpoints = TrainCheckpoints(self._folder / "checkpoints", setup.about, keep=config.keep)
        state = setup.state()
        if checkpoints.latest is not None:
            number, state, position = checkpoints.restore(like(state, jax.tree.map(lambda a: a.sharding, state)))
            self._rows.set_state(position)
            self._console.print(f"Going on from step {number} of {self._folder}", highlight=False)
        first = int(state.step)
        writer = MetricsFile(self._folder, first)
        step = jax.jit(setup.step, donate_argnums=0, out_shardings=self._out_shardings(state))
        figures: dict[str, Any] = {}
        total = config.optimizer.total_steps
        reports: collections.deque[tuple[int, StepReport]] = collections.deque()
        try:
            with _StopOnSignals(self._stop), _Bar(self._console, first, total) as (bar, task):
                began, taken = time.perf_counter(), first
                for number in range(first + 1, total + 1):
                    state, report = step(state, setup.frozen, self._batches(), None)
                    reports.append((number, report))
                    last = number == total or self._stop.is_set()
                    while len(reports) > (0 if last else LATE):
                        done, report = reports.popleft()
                        described = self._report(writer, done, report, began, done - taken)
                        bar.update(task, completed=done, description=described)
                    if last or number % config.save_every == 0:
                        self._drain(reports, writer, began, taken)
                        checkpoints.save(number, state, self._rows.get_state())
                    if self._held_out is not None and (number == total or number % config.evaluate_every == 0):
                        self._drain(reports, writer, began, taken)
                        figures = self._evaluate(state)
                        writer.write("evaluate", number, figures)
                    if last:  # not what the signal says by now: only what was saved may end the run
                        break
            checkpoints.wait()
            finished = int(state.step) == total
            exported = self._export(state) if finished else []
            plot_curves(self._folder)
            return Outcome(int(state.step), finished, figures, exported)
        finally:
            writer.close()
            checkpoints.close()

    def _out_shardings(self, state: TrainState) -> Any:
        if self._setup.placement is None:
            return None
        return self._setup.shardings(state), None

    def _batches(self) -> Batch:
        """The next `accumulate` batches, [N, rows, T] on the devices."""
        fields = [field.name for field in dataclasses.fields(Batch)]
        taken = [next(self._rows) for _ in range(self._setup.config.data.accumulate)]
        arrays = {name: np.stack([rows[name] for rows in taken]) for name in fields}
        return Batch(**{name: self._place(array) for name, array in arrays.items()})

    def _place(self, array: np.ndarray) -> jax.Array:
        if self._setup.placement is None:
            return jnp.asarray(array)
        sharding = NamedSharding(self._setup.placement.mesh, PartitionSpec(None, *ROWS))
        return jax.make_array_from_process_local_data(sharding, array)

    def _report(self, writer: MetricsFile, number: int, report: StepReport, began: float, taken: int) -> str:
        """Fetches a step's figures, writes them when due, and returns the line beside the bar."""
        if not bool(report.finite):
            raise TrainingError(
                f"step {number}: the loss ({float(report.loss)}) or its gradient ({float(report.gradient_norm)}) is "
                "not finite; the step was not taken, and nothing is saved from here on. The batch is number "
                f"{number * self._setup.config.data.accumulate} of the data's order with seed "
                f"{self._setup.config.data.seed}"
            )
        figures = metrics(report.counts)
        seconds = (time.perf_counter() - began) / max(taken, 1)
        tokens = self._setup.config.data.rows * self._setup.config.data.accumulate * self._setup.config.data.length
        if number % self._setup.config.log_every == 0 or number == self._setup.config.optimizer.total_steps:
            timed = {"step_seconds": seconds, "tokens_per_second": tokens / seconds}
            total = {"total_loss": float(report.loss), "gradient_norm": float(report.gradient_norm)}
            writer.write("train", number, figures | total | timed)
        return (
            f"loss {float(report.loss):.3f}  acceptance {figures['acceptance'][0]:.0%}  "
            f"length {figures['simulated_acceptance_length']:.2f}  {tokens / seconds:.0f} tokens/s"
        )

    def _drain(self, reports: collections.deque, writer: MetricsFile, began: float, taken: int) -> None:
        """Looks at every step so far, so that nothing that went wrong is saved."""
        while reports:
            number, report = reports.popleft()
            self._report(writer, number, report, began, number - taken)

    def _evaluate(self, state: TrainState) -> dict[str, Any]:
        assert self._held_out is not None
        counts = None
        for rows in self._held_out.batches:
            batch = Batch(*(self._place(rows[field.name][None])[0] for field in dataclasses.fields(Batch)))
            found = self._count(state.parameters, self._setup.frozen, batch, None)
            counts = found if counts is None else jax.tree.map(jnp.add, counts, found)
        figures = {} if counts is None else metrics(counts)
        if self._held_out.prompts:
            model = self._setup.model(state.parameters)
            if self._generator is None:
                self._generator = Generator(
                    self._setup.target.model,
                    model,
                    num_draft_tokens=self._setup.config.loss.steps,
                    placement=self._setup.placement,
                )
            self._generator.update_drafter(model)
            result = self._generator.generate(self._held_out.prompts, max_new_tokens=self._held_out.max_new_tokens)
            figures["decoded_acceptance_length"] = result.mean_acceptance_length
            figures["decoded_acceptance"] = result.acceptance_per_position
        return figures

    def _export(self, state: TrainState) -> list[Path]:
        arrays = {path: np.asarray(array) for path, array in self._setup.arrays(state.parameters).items()}
        drafter = DrafterCheckpoint.from_arrays(self._setup.drafter, arrays)
        dtype = np.dtype(self._setup.target.model.dtype).name
        folders = []
        for layout in self._setup.config.export:
            folder = self._folder / "export" / layout
            export_drafter(drafter, folder, layout, dtype=dtype, overwrite=True, target=self._setup.config.target)
            folders.append(folder)
        return folders


class _Bar:
    def __init__(self, console: Console, first: int, total: int):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=not console.is_terminal)
        self._first, self._total = first, total

    def __enter__(self) -> tuple[Progress, Any]:
        self._progress.start()
        return self._progress, self._progress.add_task("compiling", total=self._total, completed=self._first)

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


class _StopOnSignals:
    """SIGTERM (a preempted machine) and Ctrl-C end the run after the step in progress, saved. Main thread only."""

    def __init__(self, stop: threading.Event):
        self._stop = stop
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, lambda *_: self._stop.set())

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
