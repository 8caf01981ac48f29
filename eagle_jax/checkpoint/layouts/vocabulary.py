"""The two tables of a reduced draft vocabulary: `d2t` (offsets) and `t2d` (membership).

In memory the drafter holds absolute ids; in files the convention is target id = draft id + d2t[draft id]. No server
checks these tables, and every mistake in them is silent there: acceptance just collapses.
"""

from __future__ import annotations

import numpy as np

from eagle_jax.checkpoint.source import TensorSource
from eagle_jax.errors import CheckpointError


def read_draft_to_target(source: TensorSource, vocab_size: int, draft_vocab_size: int) -> np.ndarray | None:
    """Absolute target ids [U] int32 of the draft vocabulary, or None when it is the whole vocabulary.

    Raises:
      CheckpointError: `d2t` is missing, or not an ascending choice of target ids, or `t2d` says otherwise.
    """
    names = set(source.keys())
    full = draft_vocab_size == vocab_size
    if "d2t" not in names:
        if not full:
            raise CheckpointError(
                f"{source.where}: d2t is missing, although the draft vocabulary ({draft_vocab_size}) is smaller than "
                f"the target's ({vocab_size}): without it every draft id names a wrong token"
            )
        ids = None
    else:
        ids = _absolute(source, vocab_size, draft_vocab_size)
    if "t2d" in names:
        _check_membership(source, ids, vocab_size)
    return None if full or ids is None else ids.astype(np.int32)


def offsets(ids: np.ndarray) -> np.ndarray:
    """`d2t` [U] int64 for absolute ids [U]."""
    return ids.astype(np.int64) - np.arange(len(ids), dtype=np.int64)


def membership(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """`t2d` [V] bool for absolute ids [U]."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[ids] = True
    return mask


def check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    """Raises CheckpointError unless absolute ids ascend strictly within [0, vocab_size)."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        i = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise CheckpointError(f"{where}: draft id {i} maps to target id {int(ids[i])}, outside [0, {vocab_size})")
    steps = np.diff(ids)
    if (steps <= 0).any():
        i = int(np.argmax(steps <= 0))
        raise CheckpointError(
            f"{where}: target ids must ascend strictly with the draft id; draft ids {i} and {i + 1} map to "
            f"{int(ids[i])} and {int(ids[i + 1])}"
        )


def _absolute(source: TensorSource, vocab_size: int, draft_vocab_size: int) -> np.ndarray:
    info = source.info("d2t")
    where = f"{info.file}: d2t"
    if info.dtype.kind not in "iu":
        raise CheckpointError(f"{where}: must hold integers, found {info.dtype} (a float cannot hold every id)")
    if info.shape != (draft_vocab_size,):
        raise CheckpointError(f"{where}: shape {list(info.shape)}, draft_vocab_size says [{draft_vocab_size}]")
    stored = source.read("d2t").astype(np.int64)
    if draft_vocab_size == vocab_size and stored.any():
        raise CheckpointError(
            f"{where}: offsets of a full vocabulary must all be 0 (target id = draft id + d2t[draft id]); the identity "
            "written as 0, 1, 2, ... would name wrong tokens"
        )
    ids = stored + np.arange(draft_vocab_size, dtype=np.int64)
    try:
        check_ids(ids, vocab_size, where)
    except CheckpointError as error:
        if np.array_equal(stored, np.unique(stored)) and stored.min() >= 0 and stored.max() < vocab_size:
            raise CheckpointError(
                f"{error}. The table looks like absolute ids; it must hold offsets (target id - draft id)"
            ) from error
        raise
    return ids


def _check_membership(source: TensorSource, ids: np.ndarray | None, vocab_size: int) -> None:
    """`ids` is None for a full vocabulary."""
    info = source.info("t2d")
    where = f"{info.file}: t2d"
    if info.shape != (vocab_size,) or info.dtype.kind not in "biu":
        raise CheckpointError(f"{where}: {info.dtype} {list(info.shape)}, expected bool [{vocab_size}]")
    expected = np.True_ if ids is None else membership(ids, vocab_size)
    wrong = np.flatnonzero(source.read("t2d").astype(np.int64) != expected)
    if len(wrong):
        other = "a full vocabulary" if ids is None else "d2t"
        raise CheckpointError(
            f"{where}: disagrees with {other} about {len(wrong)} target ids (first: {int(wrong[0])}); it belongs to "
            "another drafter"
        )
