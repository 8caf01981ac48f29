"""Documents packed into rows of T tokens, and batches of such rows by number.

Which documents share a row is planned from their lengths alone, once: so the number of rows is known beforehand, batch
b holds the same rows however many hosts read it, and a position in the data is one number. grain's own first-fit
packing works on a stream per host: each host has its own number of rows, and other rows when there are more hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from eagle_jax.data.records_reader import RecordReader
from eagle_jax.errors import InputError

POOL = 4096


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Documents one after the other, then padding.

    tokens: [T] int32; mask: [T] bool, tokens of answers; documents: [T] int32, 1 .. in order, 0 for padding.
    positions: [T] int32, from 0 in each document; 0 for padding.
    """

    tokens: np.ndarray
    mask: np.ndarray
    documents: np.ndarray
    positions: np.ndarray


def plan_rows(lengths: np.ndarray, T: int, *, seed: int, pool: int = POOL) -> list[np.ndarray]:
    """Which documents share a row: in an order drawn from `seed`, `pool` documents at a time, first fit, longest first.

    Args:
      lengths: [N] tokens of each document, 1 .. T; T: tokens of a row.

    Returns:
      Numbers of documents per row; every document is in exactly one.
    """
    if lengths.size and not (1 <= lengths.min() and lengths.max() <= T):
        raise ValueError(f"lengths must lie in [1, {T}], found {lengths.min()} to {lengths.max()}")
    order = np.random.default_rng(seed).permutation(len(lengths))
    plan: list[np.ndarray] = []
    for begin in range(0, len(order), pool):
        documents = order[begin : begin + pool]
        documents = documents[np.argsort(-lengths[documents], kind="stable")]
        room = np.full(len(documents), T, np.int64)
        rows: list[list[int]] = []
        for i in documents:
            slot = int(np.argmax(room >= lengths[i]))  # a row that is still empty always has room
            if slot == len(rows):
                rows.append([])
            rows[slot].append(int(i))
            room[slot] -= lengths[i]
        plan += [np.asarray(row) for row in rows]
    return plan


def pack_row(records: Sequence[Mapping[str, np.ndarray]], T: int, like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """One row of `T` from records whose arrays have one entry per token.

    Args:
      records: in order; each array [n, ...].
      like: name -> array or shape with the trailing dimensions and dtype of each array to pack.

    Returns:
      Those arrays as [T, ...], zero in the padding, with documents and positions as in `PackedRow`.
    """
    row = {name: np.zeros((T, *array.shape[1:]), array.dtype) for name, array in like.items()}
    row |= {"documents": np.zeros(T, np.int32), "positions": np.zeros(T, np.int32)}
    start = 0
    for number, record in enumerate(records, start=1):
        stop = start + len(next(iter(record.values())))
        for name in like:
            row[name][start:stop] = record[name]
        row["documents"][start:stop] = number
        row["positions"][start:stop] = np.arange(stop - start)
        start = stop
    return row


def pack_chats(chats: Sequence[Any], T: int, *, seed: int) -> list[PackedRow]:
    """All rows of some `TokenizedChat`s, each of at most `T` tokens."""
    plan = plan_rows(np.asarray([len(chat.tokens) for chat in chats], np.int64), T, seed=seed)
    like = {"tokens": np.zeros(0, np.int32), "mask": np.zeros(0, bool)}
    arrays = [{"tokens": chat.tokens, "mask": chat.mask} for chat in chats]
    return [PackedRow(**pack_row([arrays[i] for i in row], T, like)) for row in plan]


class PackedBatches:
    """Batches of packed rows by number, a data source for grain: `batches[b]` -> dict of [B_local, T, ...] arrays.

    Batch b holds the rows [b B, (b + 1) B) of the epochs laid end to end, each epoch in an order of its own drawn from
    the seed; a last batch is filled up with rows of padding. A host holds its contiguous part of every batch.

    Args:
      records: a reader whose index has "length", tokens per record, and "first_answer", the first marked token.
      length: T. Longer records are cut; those whose answers begin later are left out.
      batch_size: B, over all hosts.
      seed: of the packing and of the orders.
      shard_index, shard_count: this host and how many there are.
      num_epochs: None goes on for ever.
      arrays: names in the records to pack.

    Attributes:
      num_rows, num_batches: per epoch, and in all (None without end); num_records, num_dropped, num_cut: in the data.
      num_tokens: real tokens of an epoch; fingerprint: of the order of all rows, whatever the hosts.

    Raises:
      InputError: sizes that cannot be, or no record that can be trained on.
    """

    def __init__(
        self,
        records: RecordReader,
        *,
        length: int,
        batch_size: int,
        seed: int,
        shard_index: int = 0,
        shard_count: int = 1,
        num_epochs: int | None = None,
        arrays: Sequence[str] = ("tokens", "mask"),
    ):
        if length < 2 or batch_size < 1 or (num_epochs is not None and num_epochs < 1):
            raise InputError(
                f"length must be at least 2, batch_size and num_epochs 1; found {length}, {batch_size}, {num_epochs}"
            )
        if not 0 <= shard_index < shard_count or batch_size % shard_count:
            raise InputError(
                f"a batch of {batch_size} has no part for host {shard_index} of {shard_count}; it is divided evenly"
            )
        for name in ("length", "first_answer"):
            if name not in records.index:
                raise InputError(f"{records.folder}: its index has no {name}, so it cannot be packed")
        self._records, self._length, self._batch, self._seed = records, length, batch_size, seed
        self._local, self._begin = batch_size // shard_count, batch_size // shard_count * shard_index
        lengths = records.index["length"]
        usable = np.flatnonzero(records.index["first_answer"] < length)
        if not usable.size:
            raise InputError(f"{records.folder}: no answer begins within the first {length} tokens of its chat")
        kept = np.minimum(lengths[usable], length)
        self._plan = [usable[row] for row in plan_rows(kept, length, seed=seed)]
        self.num_records, self.num_dropped = len(records), len(records) - usable.size
        self.num_cut = int((lengths[usable] > length).sum())
        self.num_tokens = int(kept.sum())
        self.num_rows = len(self._plan)
        self.num_batches = None if num_epochs is None else -(-num_epochs * self.num_rows // batch_size)
        self._end = None if num_epochs is None else num_epochs * self.num_rows
        first = records[0]
        self._like = {name: first[name] for name in arrays}
        key = np.concatenate([lengths, records.index["first_answer"], [length, batch_size, seed]]).astype(np.int64)
        identity = json.dumps(records.metadata, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(identity + key.tobytes()).hexdigest()[:16]
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, 1, epoch]).permutation(self.num_rows)

    def __len__(self) -> int:
        return self.num_batches if self.num_batches is not None else 2**62

    def _row(self, number: int) -> dict[str, np.ndarray]:
        if self._end is not None and number >= self._end:
            return pack_row([], self._length, self._like)
        epoch, place = divmod(number, self.num_rows)
        cut = []
        for i in self._plan[self._order(epoch)[place]]:
            record = self._records[i]
            cut.append({name: record[name][: self._length] for name in self._like})
        return pack_row(cut, self._length, self._like)

    def __getitem__(self, key: SupportsIndex) -> dict[str, np.ndarray]:
        begin = int(key) * self._batch + self._begin
        rows = [self._row(number) for number in range(begin, begin + self._local)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_order": functools.lru_cache(maxsize=2)(self._permutation)}

    def __repr__(self) -> str:
        return f"PackedBatches({self._records!r}, length={self._length}, batch_size={self._batch}, seed={self._seed})"
