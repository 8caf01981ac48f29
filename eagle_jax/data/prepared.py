"""From files of chats to token ids and masks on disk, ready for training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle_jax.data.chats import Chat, ReadReport, iterate_chats
from eagle_jax.data.masks import MaskError, Template, encode_training_chat
from eagle_jax.data.records_file import RecordWriter
from eagle_jax.data.records_reader import RecordReader
from eagle_jax.errors import CheckpointError, InputError

KIND = "tokenized chats"
VERSION = 1
_MESSAGES_KEPT = 5
Turns = Literal["all", "last", "each"]


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """How chats become token ids.

    Attributes:
      max_length: tokens of a record at most; the rest of a chat is cut off.
      turns: "all" marks all answers; "last" the last one; "each" makes a record of every answer with what precedes it,
        as generation meets it, for templates that render earlier turns otherwise.
      template_options: the chat template's own switches.
      skip, limit: leave out the first chats, and those after so many (None: none): some of a file for evaluation, say.
    """

    max_length: int
    turns: Turns = "all"
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    skip: int = 0
    limit: int | None = None


@dataclasses.dataclass
class PrepareReport:
    """Counts of a `prepare` run.

    chats: read; skipped: unusable lines; refused: chats that the template refuses; dropped: records without an answer
    within the length; cut: records cut off; records: written; tokens, answer_tokens: in them; problems: the first few.
    """

    chats: int = 0
    skipped: int = 0
    refused: int = 0
    dropped: int = 0
    cut: int = 0
    records: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """The same for tokenizers that give every text piece, and every special token, the same id."""
    special = sorted(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    value = json.dumps([sorted(tokenizer.get_vocab().items()), special])
    return hashlib.sha256(value.encode()).hexdigest()


def text_fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_fingerprint(path: Path) -> dict[str, Any]:
    """{"name", "bytes", "sha256"} of a file: what identifies it wherever it lies."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"name": path.name, "bytes": file.tell(), "sha256": digest}
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error


def prepare(
    sources: Sequence[Path | str],
    folder: Path | str,
    tokenizer: Any,
    options: PrepareOptions,
    *,
    end_token_ids: Collection[int] = (),
    strict: bool = False,
    overwrite: bool = False,
    records_per_shard: int = 4096,
    progress: Callable[[PrepareReport], None] | None = None,
) -> PrepareReport:
    """Writes a folder of records {"tokens": [n] int32, "mask": [n] bool} that `PreparedData` and `training_rows` read.

    Args:
      sources: files of chats; folder: to write, whole or not at all.
      end_token_ids: ids that end an answer (the target's), beside the tokenizer's own.
      strict: refuse what would otherwise be counted and skipped.
      progress: called after every chat.

    Raises:
      InputError: unreadable files, nothing to train on, a template whose answers cannot be located.
      CheckpointError: the disk refuses.
    """
    if options.max_length < 2:
        raise InputError(f"max_length must be at least 2, found {options.max_length}")
    if options.skip < 0 or (options.limit is not None and options.limit < 1):
        raise InputError(f"skip must be at least 0 and limit 1, found {options.skip} and {options.limit}")
    paths = [Path(source) for source in sources]
    metadata = {
        "kind": KIND,
        "version": VERSION,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": len(tokenizer),
        "chat_template": text_fingerprint(Template(tokenizer, options.template_options).source),
        "template_options": dict(options.template_options),
        "end_token_ids": sorted(int(i) for i in end_token_ids),
        "turns": options.turns,
        "max_length": options.max_length,
        "skip": options.skip,
        "limit": options.limit,
        "sources": [file_fingerprint(path) for path in paths],
    }
    report = PrepareReport()
    index = ("length", "first_answer")
    with RecordWriter(
        folder, metadata, records_per_shard=records_per_shard, index=index, overwrite=overwrite
    ) as writer:
        for path in paths:
            read = ReadReport(str(path))
            for chat in iterate_chats(path, read, strict=strict):
                if options.limit is not None and report.chats == options.skip + options.limit:
                    break
                report.chats += 1
                if report.chats > options.skip:
                    _write(writer, path, chat, tokenizer, options, end_token_ids, strict, report)
                if progress is not None:
                    progress(report)
            report.skipped += read.skipped
            report.problems = (report.problems + read.messages)[:_MESSAGES_KEPT]
        if not report.records:
            first = f"; the first problem: {report.problems[0]}" if report.problems else ""
            raise InputError(
                f"{', '.join(map(str, paths))}: nothing to train on in {report.chats} chats: the template refuses "
                f"{report.refused}, {report.dropped} have no answer within {options.max_length} tokens{first}"
            )
        writer.summary.update(dataclasses.asdict(report))
    return report


def _write(
    writer: RecordWriter,
    path: Path,
    chat: Chat,
    tokenizer: Any,
    options: PrepareOptions,
    end_token_ids: Collection[int],
    strict: bool,
    report: PrepareReport,
) -> None:
    """Adds the records of one chat."""
    for messages in _parts(chat, options.turns):
        try:
            encoded = encode_training_chat(
                tokenizer,
                messages,
                last_turn_only=options.turns != "all",
                unfinished=chat.unfinished and len(messages) == len(chat.messages),
                template_options=options.template_options,
                end_token_ids=end_token_ids,
            )
        except InputError as error:
            message = f"{path}: chat {chat.id!r}: {error}"
            if strict or isinstance(error, MaskError):
                raise type(error)(message) from error
            report.refused += 1
            if len(report.problems) < _MESSAGES_KEPT:
                report.problems.append(message)
            return
        tokens, mask = encoded.tokens[: options.max_length], encoded.mask[: options.max_length]
        if not mask.any():
            report.dropped += 1
            continue
        writer.append({"tokens": tokens, "mask": mask}, length=len(tokens), first_answer=int(np.argmax(mask)))
        report.cut += len(encoded.tokens) > len(tokens)
        report.records += 1
        report.tokens += len(tokens)
        report.answer_tokens += int(mask.sum())


def _parts(chat: Chat, turns: Turns) -> Iterator[tuple[dict[str, str], ...]]:
    if turns != "each":
        yield chat.messages
        return
    for i, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            yield chat.messages[: i + 1]


class PreparedData(RecordReader):
    """A folder that `prepare` wrote.

    Args:
      folder: the folder.
      tokenizer: refuse data of another tokenizer than this one; None does not look.

    Raises:
      InputError: no such folder, or data of another tokenizer.
      CheckpointError: damaged, or records of something else.
    """

    def __init__(self, folder: Path | str, tokenizer: Any = None):
        super().__init__(folder)
        if self.metadata.get("kind") != KIND or self.metadata.get("version") != VERSION:
            found = f"{self.metadata.get('kind')} of version {self.metadata.get('version')}"
            raise CheckpointError(
                f"{self.folder}: holds {found}, expected {KIND} of version {VERSION}: prepare it again"
            )
        if tokenizer is not None and tokenizer_fingerprint(tokenizer) != self.metadata["tokenizer"]:
            raise InputError(
                f"{self.folder}: is of another tokenizer ({self.metadata['vocab_size']} tokens, this one has "
                f"{len(tokenizer)}): its ids mean other tokens; prepare it again"
            )

    @property
    def fingerprint(self) -> str:
        """Of what the data was made from, and how."""
        return text_fingerprint(json.dumps(self.metadata, sort_keys=True))

    def answer_token_counts(self, vocab_size: int) -> np.ndarray:
        """[V] int64: how often each id occurs in answers.

        Raises:
          InputError: an id lies outside [0, V).
        """
        counts = np.zeros(vocab_size, np.int64)
        for i in range(len(self)):
            record = self[i]
            found = np.bincount(record["tokens"][record["mask"]], minlength=vocab_size)
            if len(found) > vocab_size:
                raise InputError(f"{self.folder}: holds the id {len(found) - 1}, outside a vocabulary of {vocab_size}")
            counts += found
        return counts
