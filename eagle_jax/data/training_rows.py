"""Batches of packed rows as a grain iterator, which stops and resumes exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from eagle_jax.data.packing import PackedBatches
from eagle_jax.data.records_reader import RecordReader
from eagle_jax.errors import CheckpointError


class RowIterator(grain.DatasetIterator):
    """Iterates over `PackedBatches`; its state is JSON-able, and is refused by an iterator over other rows.

    The state does not depend on the hosts: a run may go on with another number of them.
    """

    def __init__(self, batches: PackedBatches, *, read_threads: int, prefetch: int):
        options = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=prefetch)
        super().__init__(iter(grain.MapDataset.source(batches).to_iter_dataset(options)))
        self.batches = batches

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        """{"rows": which rows, "batch": {"next_index": how many batches were taken}}."""
        return {"rows": self.batches.fingerprint, "batch": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `get_state` was called.

        Raises:
          CheckpointError: the state is of other data, or of another length, batch size or seed.
        """
        if state.get("rows") != self.batches.fingerprint:
            raise CheckpointError(
                f"the saved position in the data ({state.get('rows')}) is not one in {self.batches!r} "
                f"({self.batches.fingerprint}): data, length, batch size or seed have changed"
            )
        self._parent.set_state(state["batch"])


def training_rows(
    dataset_path: Path | str,
    *,
    length: int,
    batch_size: int,
    seed: int,
    shard_index: int = 0,
    shard_count: int = 1,
    num_epochs: int | None = None,
    arrays: Sequence[str] = ("tokens", "mask"),
    read_threads: int = 2,
    prefetch: int = 4,
) -> RowIterator:
    """Batches of packed rows of a folder of records: dicts of tokens, mask, documents, positions, [B_local, T] each.

    `batches` of the result says how many there are; its state can be saved and restored. Arguments as `PackedBatches`.
    """
    batches = PackedBatches(
        RecordReader(dataset_path),
        length=length,
        batch_size=batch_size,
        seed=seed,
        shard_index=shard_index,
        shard_count=shard_count,
        num_epochs=num_epochs,
        arrays=arrays,
    )
    return RowIterator(batches, read_threads=read_threads, prefetch=prefetch)
