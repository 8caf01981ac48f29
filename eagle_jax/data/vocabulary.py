"""The draft vocabulary: which of the target's tokens a drafter can propose."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.data.prepared import PreparedData
from eagle_jax.errors import CheckpointError, InputError

FORMAT = "eagle-jax draft vocabulary"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """Attributes:
    ids: [U] int32 target ids, ascending; draft id u stands for ids[u].
    vocab_size: V of the target.
    coverage: share of the counted tokens that lie in it.
    data: fingerprint of the data counted.
    """

    ids: np.ndarray
    vocab_size: int
    coverage: float
    data: str

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def d2t(self) -> np.ndarray:
        """[U] int64 offsets: target id = draft id + d2t[draft id]."""
        return self.ids.astype(np.int64) - np.arange(len(self.ids))

    @property
    def t2d(self) -> np.ndarray:
        """[V] bool: whether a target id is in it."""
        inside = np.zeros(self.vocab_size, bool)
        inside[self.ids] = True
        return inside

    @property
    def fingerprint(self) -> str:
        key = np.asarray([self.vocab_size, *self.ids], np.int64)
        return hashlib.sha256(key.tobytes()).hexdigest()


def select(counts: np.ndarray, size: int, *, always: Collection[int] = (), data: str = "") -> DraftVocabulary:
    """The `size` most frequent tokens; ties, and places left over, go to the lowest ids.

    Args:
      counts: [V] occurrences of each target id in answers.
      always: ids that are in it whatever their counts (end and special tokens).
      data: fingerprint of the data counted.

    Raises:
      InputError: a size outside [1, V], more ids to keep than places, ids outside [0, V), nothing counted.
    """
    V = len(counts)
    if not 1 <= size <= V:
        raise InputError(f"the draft vocabulary's size must lie in [1, {V}], the target's, found {size}")
    kept = sorted({int(i) for i in always})
    if kept and not (kept[0] >= 0 and kept[-1] < V):
        raise InputError(f"tokens to keep lie outside [0, {V}): {kept[0]} to {kept[-1]}")
    if len(kept) > size:
        raise InputError(f"{len(kept)} end and special tokens do not fit into a draft vocabulary of {size}")
    total = int(counts.sum())
    if not total:
        raise InputError("there is no answer token to count")
    first = np.ones(V, bool)
    first[kept] = False
    # Kept tokens, then by count, then by id: what was never seen comes last, lowest ids first.
    order = np.lexsort((np.arange(V), -np.asarray(counts, np.int64), first))
    ids = np.sort(order[:size]).astype(np.int32)
    return DraftVocabulary(ids, V, int(counts[ids].sum()) / total, data)


def build(data: PreparedData, size: int, *, vocab_size: int, always: Collection[int] = ()) -> DraftVocabulary:
    """`select` over the answers of prepared data."""
    if not 1 <= size <= vocab_size:  # before reading everything
        raise InputError(f"the draft vocabulary's size must lie in [1, {vocab_size}], the target's, found {size}")
    return select(data.answer_token_counts(vocab_size), size, always=always, data=data.fingerprint)


def kept_tokens(tokenizer: Any, end_token_ids: Collection[int], vocab_size: int) -> list[int]:
    """End tokens, and the special tokens that an answer can hold or end with: the tokenizer's named ones.

    Reserved tokens (hundreds in some vocabularies) have no name and take no place.
    """
    return sorted({i for i in [*end_token_ids, *tokenizer.all_special_ids] if 0 <= i < vocab_size})


def cached_path(folder: Path | str, size: int, data: str) -> Path:
    """Where the vocabulary of this size from this data is kept: neither can be mistaken for another's."""
    return Path(folder) / f"vocabulary-{size}-{data[:16]}.json"


def save(vocabulary: DraftVocabulary, path: Path | str) -> None:
    """Writes it as JSON, whole or not at all."""
    path = Path(path)
    value = {
        "format": FORMAT,
        "version": VERSION,
        "size": vocabulary.size,
        "vocab_size": vocabulary.vocab_size,
        "coverage": vocabulary.coverage,
        "data": vocabulary.data,
        "fingerprint": vocabulary.fingerprint,
        "ids": vocabulary.ids.tolist(),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(value) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path}: cannot write: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path | str, *, vocab_size: int | None = None) -> DraftVocabulary:
    """Reads and checks what `save` wrote.

    Args:
      vocab_size: of the target it is wanted for; None does not look.

    Raises:
      InputError: the file cannot be read, or belongs to another target.
      CheckpointError: it is damaged or of another kind.
    """
    try:
        value = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
        raise CheckpointError(f"{path}: not a draft vocabulary of version {VERSION}")
    try:
        ids, V = np.asarray(value["ids"], np.int64), int(value["vocab_size"])
        found = DraftVocabulary(ids.astype(np.int32), V, float(value["coverage"]), str(value["data"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged: {error!r}") from error
    if ids.ndim != 1 or not ids.size or ids[0] < 0 or ids[-1] >= V or (np.diff(ids) <= 0).any():
        raise CheckpointError(f"{path}: ids must ascend within [0, {V})")
    if value.get("size") != found.size or value.get("fingerprint") != found.fingerprint:
        raise CheckpointError(f"{path}: was changed after it was written: size or fingerprint differ from its ids")
    if vocab_size is not None and V != vocab_size:
        raise InputError(f"{path}: is for a target of {V} tokens, this one has {vocab_size}")
    return found
