"""Files of generated chats: written line by line, continued after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from eagle_jax.errors import CheckpointError, InputError


class ChatOutput:
    """A JSON Lines file of chats that grows; a context manager.

    Opening a file that is there keeps its complete lines and drops a half-written last one. What is left out on purpose
    (an unfinished answer) is noted in a file beside it, `<name>.left_out`, so that it is not tried again.

    Args:
      path: the file.
      settings: recorded in each line under "generation"; a file begun with others is not continued.

    Attributes:
      lines: the objects that are there already, with "id" and "messages"; left_out: ids noted as such.

    Raises:
      InputError: the file cannot be written, holds something else, or was begun with other settings.
    """

    def __init__(self, path: Path | str, settings: Mapping[str, Any]):
        self.path = Path(path)
        self.settings = dict(settings)
        self._side = self.path.with_name(self.path.name + ".left_out")
        self._file: BinaryIO | None = None  # opened by the first chat: a run that fails before leaves no empty file
        if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
            problem = "it is a folder" if self.path.is_dir() else f"{self.path.parent} is no folder to write to"
            raise InputError(f"{self.path}: cannot be written: {problem}")
        try:
            self.lines = _complete_lines(self.path)
            self.left_out = {str(line.get("id")): str(line.get("reason")) for line in _complete_lines(self._side)}
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be written: {error.strerror or error}") from error
        for number, line in enumerate(self.lines, start=1):
            self._check(number, line)

    def _check(self, number: int, line: dict[str, Any]) -> None:
        generation = line.get("generation")
        if "id" not in line or "messages" not in line or not isinstance(generation, dict):
            raise InputError(f"{self.path}:{number}: is not a generated chat; name another file")
        for key, value in self.settings.items():
            if generation.get(key) != value:
                raise InputError(
                    f"{self.path}:{number}: was generated with {key} {generation.get(key)!r}, this run has {value!r}; "
                    "name another file, or remove it to start over"
                )

    def append(self, chats: Iterable[Mapping[str, Any]], left_out: Mapping[str, str] | None = None) -> None:
        """Adds chats {"id", "messages", ...} and notes left out ids with their reasons; both are on disk afterwards.

        Raises:
          CheckpointError: the disk refuses.
        """
        try:
            if self._file is None:
                self._file = self.path.open("ab")
            for chat in chats:
                line = {**chat, "generation": {**self.settings, **chat.get("generation", {})}}
                self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            if left_out:
                with self._side.open("ab") as side:
                    side.writelines(json.dumps({"id": i, "reason": r}).encode() + b"\n" for i, r in left_out.items())
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot write: {error.strerror or error}") from error

    def __enter__(self) -> ChatOutput:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._file is not None:
            self._file.close()


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, none if it is not there; a half-written last line is cut off."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    kept = 0
    with path.open("r+b") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                file.truncate(kept)
                break
            try:
                value = json.loads(raw)
            except ValueError as error:
                raise InputError(f"{path}:{number}: not valid JSON; name another file, or remove it") from error
            if not isinstance(value, dict):
                raise InputError(f"{path}:{number}: is not a generated chat; name another file")
            found.append(value)
            kept += len(raw)
    return found
