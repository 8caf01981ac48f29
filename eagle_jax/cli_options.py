"""What the commands share: options of the same meaning, and how a user's mistake is reported."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle_jax.errors import EagleJaxError, InputError


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def _writable(path: Path | None) -> Path | None:
    """Refuses a result file before any work is done for it."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        problem = "is a folder" if path.is_dir() else f"{path.parent} is no folder that can be written to"
        raise typer.BadParameter(f"{path}: {problem}")
    return path


Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=_writable, help="Write the result as JSON.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables.")]


def fail(problem: object) -> None:
    typer.echo(f"eagle-jax: {' '.join(str(problem).splitlines())}", err=True)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake ends the process with one line and exit code 2; Ctrl-C with 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EagleJaxError as error:
            fail(error)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read our output has seen enough
                raise
            fail(f"{error.filename}: {error.strerror}" if error.filename is not None else error)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            fail("interrupted")
            raise typer.Exit(130) from error

    return wrapped


def status(quiet: bool, text: str):
    return Console(stderr=True, quiet=quiet).status(text)


def numbers(text: str, separator: str, option: str, example: str) -> list[int]:
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError as error:
        raise InputError(f"{option}: expected numbers like {example}, found {text!r}") from error


def mesh_shape(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sizes = numbers(text, "x", "--mesh", "1x4")
    if len(sizes) != 2:
        raise InputError(f"--mesh: expected DATAxTENSOR like 1x4, found {text!r}")
    return sizes[0], sizes[1]
