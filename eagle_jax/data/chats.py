"""Chats to train on: JSON Lines or a JSON list, in OpenAI's `messages` form or in ShareGPT's `conversations` form."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError

_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_OPENAI_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_MESSAGES_KEPT = 5


@dataclasses.dataclass(frozen=True)
class Chat:
    """One conversation with at least one answer.

    Attributes:
      id: the file's, or "line-7".
      category: kind of task, or None.
      messages: {"role", "content"} and sometimes "reasoning_content": an optional system message, then user and
        assistant in turn, starting with the user. Contents are not blank.
      unfinished: the last answer met a length limit, as files of `regenerate` say: nothing closes it.
    """

    id: str
    category: str | None
    messages: tuple[dict[str, str], ...]
    unfinished: bool = False


@dataclasses.dataclass
class ReadReport:
    """What reading a file of chats met.

    Attributes:
      path: the file.
      chats: how many were read.
      skipped: lines that hold no usable chat; reasons: how many of them by kind of problem.
      messages: the first few problems, each with its line.
    """

    path: str
    chats: int = 0
    skipped: int = 0
    reasons: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    messages: list[str] = dataclasses.field(default_factory=list)


class _Unusable(Exception):
    """A line that is no chat: `reason` is the kind of problem, `detail` what exactly."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}{': ' if detail else ''}{detail}")
        self.reason = reason


def read_chats(path: Path | str, *, strict: bool = False) -> tuple[list[Chat], ReadReport]:
    """All chats of a file, and what was skipped. See `iterate_chats`, which needs memory for one line only."""
    report = ReadReport(str(path))
    return list(iterate_chats(path, report, strict=strict)), report


def iterate_chats(path: Path | str, report: ReadReport, *, strict: bool = False) -> Iterator[Chat]:
    """Chats one by one; lines that are not usable are counted in `report` and skipped, or refused with `strict`.

    Not usable: no JSON, unknown roles, a blank content, turns that do not alternate, no answer, tool calls.

    Raises:
      InputError: the file cannot be read or holds no usable chat; with `strict`, the first problem (as file:line).
    """
    for where, value in _values(Path(path)):
        try:
            if isinstance(value, _Unusable):
                raise value
            chat = _parse(value, default_id=where.replace(" ", "-"))
        except _Unusable as problem:
            message = f"{path}:{where.removeprefix('line ')}: {problem}"
            if strict:
                raise InputError(message) from problem
            report.skipped += 1
            report.reasons[problem.reason] = report.reasons.get(problem.reason, 0) + 1
            if len(report.messages) < _MESSAGES_KEPT:
                report.messages.append(message)
            continue
        report.chats += 1
        yield chat
    if not report.chats:
        found = f"; the first problem of {report.skipped}: {report.messages[0]}" if report.messages else ""
        raise InputError(f"{path}: holds no usable chat; expected lines like {_EXAMPLE}{found}")


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """("line 7", its JSON value or the problem) for each line that is not blank; or the items of one JSON list."""
    try:
        with path.open("rb") as file:
            first = True
            for number, raw in enumerate(file, start=1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if not raw.strip():
                    continue
                if first and raw.lstrip().startswith(b"["):  # no line of JSON Lines starts so
                    yield from _items(path, raw + file.read())
                    return
                first = False
                yield f"line {number}", _load(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error


def _items(path: Path, raw: bytes) -> Iterator[tuple[str, Any]]:
    value = _load(raw)
    if isinstance(value, _Unusable):
        raise InputError(f"{path}: {value}; expected a JSON list of chats, or one chat per line")
    for i, item in enumerate(value, start=1):
        yield f"item {i}", item


def _load(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _Unusable("not UTF-8", f"byte {error.start + 1} of the line")
    except (ValueError, RecursionError) as error:
        place = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return _Unusable("not valid JSON", place)


def _parse(value: Any, default_id: str) -> Chat:
    if not isinstance(value, dict):
        raise _Unusable("not an object", f"expected {_EXAMPLE}, found {type(value).__name__}")
    keys = [key for key in ("messages", "conversations") if value.get(key) is not None]
    if len(keys) != 1:
        raise _Unusable("no messages", f"expected one of messages and conversations, found {sorted(value)[:8]}")
    listed = value[keys[0]]
    if not isinstance(listed, list):
        raise _Unusable("no messages", f"{keys[0]} must be a list, found {type(listed).__name__}")
    messages = tuple(_message(i, item) for i, item in enumerate(listed))
    _check_turns(messages)
    identity = value.get("id", value.get("question_id"))
    usable = isinstance(identity, int | str) and not isinstance(identity, bool) and identity != ""
    category = value.get("category")
    generation = value.get("generation")
    return Chat(
        str(identity) if usable else default_id,
        category if isinstance(category, str) else None,
        messages,
        isinstance(generation, dict) and generation.get("finish_reason") == "length",
    )


def _message(i: int, item: Any) -> dict[str, str]:
    if not isinstance(item, dict):
        raise _Unusable("malformed message", f"message {i} is {type(item).__name__}, not an object")
    openai = "role" in item
    role, content = (item.get("role"), item.get("content")) if openai else (item.get("from"), item.get("value"))
    known = _OPENAI_ROLES if openai else _SHAREGPT_ROLES
    if not isinstance(role, str) or role not in known:
        raise _Unusable("unknown role", f"message {i} has {role!r:.40}; known are {', '.join(known)}")
    for key in ("tool_calls", "function_call"):
        if item.get(key):
            raise _Unusable("tool calls", f"message {i} has {key}, which are not supported")
    if isinstance(content, list):  # OpenAI's parts
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise _Unusable("malformed message", f"message {i} has parts that are not text")
        content = "".join(part for part in parts if part is not None)
    if not isinstance(content, str) or not content.strip():
        raise _Unusable("empty content", f"message {i} ({role}) must have a text, found {content!r:.40}")
    message = {"role": known[role], "content": content}
    if isinstance(item.get("reasoning_content"), str):  # templates of reasoning models place it
        message["reasoning_content"] = item["reasoning_content"]
    if any("\ud800" <= character <= "\udfff" for text in message.values() for character in text):
        raise _Unusable("malformed message", f"message {i} holds half of a surrogate pair, which is not a character")
    return message


def _check_turns(messages: tuple[dict[str, str], ...]) -> None:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise _Unusable("no answer", f"no message of the assistant among {len(roles)}")
    begin = 1 if roles[0] == "system" else 0
    for i, role in enumerate(roles[begin:]):
        expected = ("user", "assistant")[i % 2]
        if role != expected:
            raise _Unusable("turns do not alternate", f"message {begin + i} is of the {role}, expected the {expected}")
