"""Checkpoints of a training run: orbax's CheckpointManager, asynchronous, with retention and a check of what resumes.

A checkpoint holds the state (parameters, optimiser, step), the data iterator's state, and a description of the run. It
appears under its number only when it is complete, so one whose saving failed or was killed is never the latest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from eagle_jax.errors import CheckpointError, ConfigError, first_line

STATE, DATA, ABOUT = "state", "data", "about"


class TrainCheckpoints:
    """The checkpoints in one folder.

    Args:
      folder: made when missing.
      about: JSON-able description of what must not change between runs (drafter, target, vocabulary, optimiser).
      keep: how many of the latest checkpoints stay.

    Raises:
      CheckpointError: the folder cannot be used.
    """

    def __init__(self, folder: Path | str, about: dict[str, Any], *, keep: int = 3):
        import orbax.checkpoint as ocp  # takes a second to import: only when training

        self._ocp = ocp
        self.folder = Path(folder).absolute()
        self.about = json.loads(json.dumps(about))
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        with self._errors("cannot be used"):
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        """Number of the last complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data_state: Any) -> None:
        """Starts saving; returns when the arrays have left the devices, so that the next step may donate them.

        Args:
          state: pytree of arrays; data_state: JSON-able.

        Raises:
          CheckpointError: this save cannot start, or the one before has failed.
        """
        arguments = self._ocp.args.Composite(
            **{
                STATE: self._ocp.args.StandardSave(state),
                DATA: self._ocp.args.JsonSave({"iterator": data_state}),
                ABOUT: self._ocp.args.JsonSave(self.about),
            }
        )
        with self._errors(f"step {step} cannot be saved"):
            self._manager.save(step, args=arguments, force=True)

    def wait(self) -> None:
        """Returns when everything is on disk. Raises CheckpointError when a save has failed."""
        with self._errors("a checkpoint could not be saved"):
            self._manager.wait_until_finished()

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any, Any]:
        """Reads a checkpoint.

        Args:
          like: pytree of `jax.ShapeDtypeStruct` with the shardings wanted, whatever they were when it was saved.
          step: None is the latest.

        Returns:
          (step, state, data_state).

        Raises:
          CheckpointError: there is none, or it cannot be read.
          ConfigError: it belongs to another run; the differing entries are named.
        """
        step = self.latest if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder}: holds no complete checkpoint")
        with self._errors(f"step {step} cannot be read"):
            about = self._read_json(step, ABOUT)
        differing = [key for key in sorted(self.about | about) if self.about.get(key) != about.get(key)]
        if differing:
            changes = "; ".join(f"{key}: {about.get(key)!r}, now {self.about.get(key)!r}" for key in differing)
            raise ConfigError(f"{self.folder}: step {step} is of another configuration ({changes})")
        arguments = self._ocp.args.Composite(**{STATE: self._ocp.args.StandardRestore(like)})
        with self._errors(f"step {step} cannot be read"):
            state = self._manager.restore(step, args=arguments)[STATE]
            return step, state, self._read_json(step, DATA)["iterator"]

    def _read_json(self, step: int, name: str) -> dict[str, Any]:
        return self._manager.restore(step, args=self._ocp.args.Composite(**{name: self._ocp.args.JsonRestore()}))[name]

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        self.wait()
        self._manager.close()

    def _errors(self, what: str) -> _Translated:
        return _Translated(f"{self.folder}: {what}")


class _Translated:
    """Turns whatever orbax and the file system raise into one line of ours."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, (CheckpointError, ConfigError)):
            raise CheckpointError(f"{self._what}: {first_line(error)}") from error


def like(state: Any, shardings: Any = None) -> Any:
    """The shapes and dtypes of a state, with these shardings (a pytree of the same structure), for `restore`."""

    def abstract(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, state) if shardings is None else jax.tree.map(abstract, state, shardings)
