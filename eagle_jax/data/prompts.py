"""Prompt files: one JSON object per line, {"id", "category"?, "turns": [text, ...]}."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError

_EXAMPLE = '{"id": "1", "turns": ["..."]}'


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation to answer.

    Attributes:
      id: unique within its file.
      category: kind of task, or None.
      turns: what the user says, turn by turn; at least one, none of them empty.
    """

    id: str
    category: str | None
    turns: tuple[str, ...]


def read_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """Read a JSON Lines file of prompts. Blank lines are skipped; reading stops after `limit` prompts.

    Spec-Bench and SPEED-Bench files read as they are: `question_id` serves as `id`, and further keys are ignored.

    Raises:
      InputError: the file cannot be read, holds no prompt, or a line is malformed (named as file:line).
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, found {limit}")
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in _lines(Path(path)):
        where = f"{path}:{number}"
        prompt = _parse(line, where)
        if prompt.id in lines:
            raise InputError(f"{where}: id {prompt.id!r} was used on line {lines[prompt.id]}; ids must be unique")
        lines[prompt.id] = number
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise InputError(f"{path}: holds no prompt; expected lines like {_EXAMPLE}")
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers; one line is in memory at a time."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from error
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error


def _parse(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{where}: not valid JSON ({problem}); expected one object like {_EXAMPLE}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object like {_EXAMPLE}, found {type(value).__name__}")
    identity = value.get("id", value.get("question_id"))
    if isinstance(identity, bool) or not isinstance(identity, int | str) or identity == "":
        raise InputError(f"{where}: id (or question_id) must be a string or a whole number, found {_short(identity)}")
    category = value.get("category")
    if category is not None and not isinstance(category, str):
        raise InputError(f"{where}: category must be a string, found {_short(category)}")
    turns = value.get("turns")
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{where}: turns must be a list of at least one text, found {_short(turns)}")
    for i, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise InputError(f"{where}: turns[{i}] must be a text that is not empty, found {_short(turn)}")
        if any("\ud800" <= character <= "\udfff" for character in turn):
            raise InputError(f"{where}: turns[{i}] holds half of a surrogate pair, which is not a character")
    return Prompt(str(identity), category, tuple(turns))


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
