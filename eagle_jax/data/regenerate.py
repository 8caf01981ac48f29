"""Answers of the target itself, for training data: what a drafter must predict is what its target says."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.data.chat_output import ChatOutput
from eagle_jax.data.chats import ReadReport, iterate_chats
from eagle_jax.data.masks import Template
from eagle_jax.data.prompts import read_prompts
from eagle_jax.data.sampling_loop import Sampler
from eagle_jax.errors import InputError
from eagle_jax.results import RowResult

_BATCHES_SORTED = 8  # so many batches are sorted by length together, so that a batch holds prompts alike


@dataclasses.dataclass(frozen=True)
class Request:
    """User turns to answer one after the other; `system` precedes them."""

    id: str
    category: str | None
    system: str | None
    turns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """temperature: 0 is greedy; seed: of all draws; max_new_tokens: per answer; batch_size: rows decoded together.

    keep_unfinished: keep answers that met the length limit. template_options: the chat template's own switches.
    """

    max_new_tokens: int
    batch_size: int = 8
    temperature: float = 0.0
    seed: int = 0
    keep_unfinished: bool = False
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class AnswerReport:
    """requests: asked for; resumed: there already; written; left_out: by reason; tokens, seconds: of decoding."""

    requests: int = 0
    resumed: int = 0
    written: int = 0
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0


def read_requests(
    path: Path | str, *, limit: int | None = None, strict: bool = False
) -> tuple[list[Request], ReadReport]:
    """Requests of a file of prompts ("turns") or of chats, whose answers are then left aside.

    Raises:
      InputError: the file cannot be read or holds neither; prompts are always read strictly.
    """
    report = ReadReport(str(path))
    if _holds_prompts(Path(path)):
        requests = [Request(p.id, p.category, None, p.turns) for p in read_prompts(path, limit)]
        report.chats = len(requests)
        return requests, report
    requests, used = [], set()
    for chat in iterate_chats(path, report, strict=strict):
        system = chat.messages[0]["content"] if chat.messages[0]["role"] == "system" else None
        name, copy = chat.id, 1
        while name in used:  # an id is what resuming goes by
            copy += 1
            name = f"{chat.id}#{copy}"
        used.add(name)
        turns = tuple(message["content"] for message in chat.messages if message["role"] == "user")
        requests.append(Request(name, chat.category, system, turns))
        if len(requests) == limit:
            break
    return requests, report


def _holds_prompts(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
    return b'"turns"' in first and b'"messages"' not in first and b'"conversations"' not in first


def row_seed(seed: int, name: str, turn: int) -> int:
    """A 32-bit seed that depends on nothing else, so that an answer does not depend on its batch or on resuming."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}/{name}".encode()).digest()[:4], "big")


def regenerate(
    requests: Sequence[Request],
    output: ChatOutput,
    sampler: Sampler,
    tokenizer: Any,
    options: AnswerOptions,
    *,
    progress: Callable[[AnswerReport], None] | None = None,
) -> AnswerReport:
    """Answers what `output` does not hold yet, turn by turn, and writes a chat per request as batches are done.

    A later turn is asked when the answer before it is finished; an unfinished one ends its chat, and is left out unless
    it is to be kept.

    Args:
      sampler: of the target; tokenizer: its own.
      progress: called after every batch of conversations.

    Raises:
      InputError: a template that refuses a conversation, options out of range.
      CheckpointError: the disk refuses.
    """
    template = Template(tokenizer, options.template_options)
    known = {str(line["id"]) for line in output.lines} | output.left_out.keys()
    pending = [request for request in requests if request.id not in known]
    report = AnswerReport(len(requests), len(requests) - len(pending))
    size = max(options.batch_size, 1)
    for begin in range(0, len(pending), size * _BATCHES_SORTED):
        window = pending[begin : begin + size * _BATCHES_SORTED]
        window = sorted(window, key=lambda request: len(request.turns[0]))
        for i in range(0, len(window), size):
            conversations = [Conversation(request) for request in window[i : i + size]]
            for turn in range(max(len(request.turns) for request in window[i : i + size])):
                asked = [c for c in conversations if c.open and turn < len(c.request.turns)]
                answer(asked, turn, sampler, tokenizer, template, options, report)
            write_chats(conversations, output, report)
            if progress is not None:
                progress(report)
    return report


class Conversation:
    """A request as it is being answered: messages so far, whether it goes on, why not."""

    def __init__(self, request: Request):
        self.request = request
        self.messages: list[dict[str, str]] = []
        if request.system is not None:
            self.messages.append({"role": "system", "content": request.system})
        self.answers = 0
        self.open = True
        self.reason = ""
        self.tokens = 0

    def line(self) -> dict[str, Any]:
        category = {} if self.request.category is None else {"category": self.request.category}
        generation = {"finish_reason": self.reason, "answer_tokens": self.tokens}
        return {"id": self.request.id, **category, "messages": self.messages, "generation": generation}


def write_chats(conversations: Sequence[Conversation], output: ChatOutput, report: AnswerReport) -> None:
    """Writes those with an answer and notes the others."""
    left_out = {c.request.id: c.reason for c in conversations if not c.answers}
    done = [c.line() for c in conversations if c.answers]
    output.append(done, left_out)
    report.written += len(done)
    for reason in left_out.values():
        report.left_out[reason] = report.left_out.get(reason, 0) + 1


def answer(
    asked: Sequence[Conversation],
    turn: int,
    sampler: Sampler,
    tokenizer: Any,
    template: Template,
    options: AnswerOptions,
    report: AnswerReport,
) -> None:
    """Answers one turn of each conversation, which is closed when that answer is not finished or empty."""
    limit = sampler.config.max_position
    prompts: list[tuple[Conversation, list[int]]] = []
    for conversation in asked:
        request = conversation.request
        messages = [*conversation.messages, {"role": "user", "content": request.turns[turn]}]
        try:
            text = template.render(messages, prompt=True)
        except InputError as error:
            raise InputError(f"request {request.id!r}: {error}") from error
        tokens = [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        if len(tokens) < limit:
            prompts.append((conversation, tokens))
        else:
            _close(conversation, "prompt too long")
    if not prompts:
        return
    result = sampler.sample(
        [tokens for _, tokens in prompts],
        temperature=options.temperature,
        seeds=[row_seed(options.seed, c.request.id, turn) for c, _ in prompts],
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
    )
    report.tokens += result.output_tokens
    report.seconds += result.seconds
    for (conversation, _), row in zip(prompts, result.rows, strict=True):
        text = decodeanswer(tokenizer, row)
        if row.finish_reason != "stop" and not options.keep_unfinished:
            _close(conversation, row.finish_reason)
        elif not text.strip():
            _close(conversation, "empty answer")
        else:
            conversation.messages += [
                {"role": "user", "content": conversation.request.turns[turn]},
                {"role": "assistant", "content": text},
            ]
            conversation.answers += 1
            conversation.tokens += len(row.tokens)
            conversation.reason = row.finish_reason
            conversation.open = row.finish_reason == "stop"


def _close(conversation: Conversation, reason: str) -> None:
    conversation.open = False
    if not conversation.answers:
        conversation.reason = reason


def decodeanswer(tokenizer: Any, row: RowResult) -> str:
    """The text of an answer, as it will be rendered by the chat template again."""
    return tokenizer.decode(row.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def shard_of(requests: Iterable[Request], index: int, count: int) -> list[Request]:
    """Every `count`-th request, from `index` on."""
    if not 0 <= index < count:
        raise InputError(f"shard {index}/{count}: the first number must lie in [0, {count})")
    return list(requests)[index::count]
