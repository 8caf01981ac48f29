"""Bad input at the command line: one clear line on stderr, exit code 2, and nothing lost or half written."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cli_models import DRAFTER, VOCAB, drafter_folder, target_folder, target_tensors
from drafter_folders import random_arrays, stored_arrays
from tiny_gguf import write_gguf

from eagle_jax.checkpoint import safetensors_file
from eagle_jax.cli import main
from eagle_jax.generation import Generator

# Every case starts in a folder that holds these, all of them good, and changes something.
TARGET, DRAFT, GGUF, PROMPTS = Path("target"), Path("drafter"), Path("m.gguf"), Path("prompts.jsonl")
LINE = b'{"id": "1", "turns": ["hello"]}\n'
STORED = stored_arrays(DRAFTER, random_arrays(DRAFTER, 5))

GENERATE = "generate --target target --drafter drafter --prompts prompts.jsonl --json out.json -q"
PLAIN = "generate --target target --drafter none --prompt hello"
CONVERT = "convert drafter out --layout vllm --json out.json"


def truncate(path: Path, kept: float) -> None:
    os.truncate(path, int(path.stat().st_size * kept))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def lose_a_shard() -> None:
    shutil.rmtree(TARGET)
    target_folder(TARGET, shards=3)
    (TARGET / "model-00002-of-00003.safetensors").unlink()


def lose_the_drafters_shard() -> None:
    (DRAFT / "model.safetensors").unlink()
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (DRAFT / "model.safetensors.index.json").write_text(json.dumps(index))


def with_nan(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flat[3] = np.nan
    return array


def drafter(tensors: dict | None = None, **changes) -> Callable[[], object]:
    return partial(drafter_folder, DRAFT, tensors, **changes)


def drafter_of_another_target(**changes) -> Callable[[], object]:
    config = dataclasses.replace(DRAFTER, **changes)
    keys = {"eagle_aux_hidden_state_layer_ids": list(config.capture_layers or ())}
    if config.target_hidden_size != DRAFTER.target_hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    return partial(drafter_folder, DRAFT, config=config, **keys)


def target(tensors: dict | None = None, **changes) -> Callable[[], object]:
    return partial(target_folder, TARGET, tensors, **changes)


# What a folder suffers -> what does it, and words of the message.
DAMAGE = {
    "truncated": (lambda folder: truncate(folder / "model.safetensors", 0.9), "model.safetensors: truncated"),
    "hardly begun": (lambda folder: truncate(folder / "model.safetensors", 0.0001), "model.safetensors: truncated"),
    "corrupt header": (lambda folder: overwrite(folder / "model.safetensors", 20, b"\xff\xfe"), "header: not valid"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "weights are a folder": (lambda folder: replace_by_folder(folder / "model.safetensors"), "model.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is a folder": (lambda folder: replace_by_folder(folder / "config.json"), "config.json"),
    "half a config": (lambda folder: truncate(folder / "config.json", 0.5), "config.json: not valid JSON"),
    "config is not UTF-8": (lambda folder: overwrite(folder / "config.json", 3, b"\xff\xfe"), "config.json: not valid"),
}
DRAFTERS = {
    "missing shard": (lose_the_drafters_shard, "missing shards: model-00001-of-00002.safetensors"),
    "wrong shape": (drafter({"fc.weight": np.ones((32, 95), np.float32)}), "fc.weight"),
    "NaN": (drafter({"midlayer.mlp.up_proj.weight": with_nan(STORED["midlayer.mlp.up_proj.weight"])}), "mlp.up_proj"),
    "missing tensor": (drafter({"norm.weight": None}), "missing: norm.weight"),
    "unknown tensor": (drafter({"stray": np.ones(3, np.float32)}), "stray"),
    "no d2t": (drafter({"d2t": None}), "d2t"),
    "d2t out of range": (drafter({"d2t": STORED["d2t"] + VOCAB}), "d2t"),
    "colliding layers": (drafter(eagle_aux_hidden_state_layer_ids=[2, 2, 3]), "[2, 2, 3]"),
    "unknown key": (drafter(surprise=1), "surprise"),
    "exclusive switches": (drafter(norm_before_fc=True), "norm_before_fc"),
} | {name: (partial(do, DRAFT), words) for name, (do, words) in DAMAGE.items()}
TARGETS = {
    "missing shard": (lose_a_shard, "missing shards: model-00002-of-00003.safetensors"),
    "wrong shape": (target({"model.norm.weight": np.ones(31, np.float32)}), "model.norm.weight"),
    "NaN": (target({"lm_head.weight": with_nan(target_tensors()["lm_head.weight"])}), "lm_head.weight"),
    "missing tensor": (target({"model.norm.weight": None}), "missing: model.norm.weight"),
    "unknown tensor": (target({"stray": np.ones(3, np.float32)}), "stray"),
    "unknown key": (target(surprise=1), "surprise"),
    "unknown family": (target(model_type="mamba"), "mamba"),
    "half a tokenizer": (lambda: truncate(TARGET / "tokenizer.json", 0.5), "tokenizer cannot be read"),
    "no tokenizer": (lambda: (TARGET / "tokenizer.json").unlink(), "holds no tokenizer"),
    "another width": (drafter_of_another_target(target_hidden_size=48, own_embedding=True), "48"),
    "another vocabulary": (drafter_of_another_target(vocab_size=VOCAB + 1), str(VOCAB + 1)),
    "layers that it lacks": (drafter_of_another_target(capture_layers=(1, 2, 30)), "30"),
} | {name: (partial(do, TARGET), words) for name, (do, words) in DAMAGE.items()}
GGUFS = {
    "truncated": (lambda: truncate(GGUF, 0.7), "m.gguf"),
    "hardly begun": (lambda: truncate(GGUF, 0.001), "m.gguf"),
    "another format": (lambda: overwrite(GGUF, 0, b"GGML"), "not a GGUF file"),
    "corrupt counts": (lambda: overwrite(GGUF, 8, b"\xff" * 16), "m.gguf"),
}
LINES = {
    "not JSON": (LINE + b'\n{"id": "2", "turns": ["x"]\n', "prompts.jsonl:3: not valid JSON"),
    "not UTF-8": (LINE + b'{"id": "2", "turns": ["\xff"]}\n', "prompts.jsonl:2: not UTF-8"),
    "an array": (b"[1]\n", "prompts.jsonl:1: expected an object"),
    "no turns": (LINE + b'{"id": "2"}\n', "prompts.jsonl:2: turns"),
    "an empty turn": (LINE + b'{"id": "2", "turns": [" "]}\n', "prompts.jsonl:2: turns[0]"),
    "one id twice": (LINE + LINE, "prompts.jsonl:2: id '1'"),
    "no lines": (b"\n\n", "prompts.jsonl: holds no prompt"),
    "too long": (LINE + json.dumps({"id": "long", "turns": ["x" * 200]}).encode(), "prompt 'long'"),
}
COMMANDS = {
    "generate --target target --drafter none": "--prompt",
    "generate --target target --drafter none --prompt \n": "--prompt is empty",
    f"generate --target target --drafter none --prompt {'x' * 200}": "the target's context holds 128",
    "generate --target target --drafter none --prompt \udcff": "--prompt",
    "generate --target target --drafter none --prompts nothing.jsonl": "nothing.jsonl: cannot read",
    "generate --target target --drafter none --prompts target": "target: cannot read",
    "generate --target target --prompt hello": "--drafter",
    "generate --target nothing --drafter none --prompt hello": "'nothing': no such",
    "generate --target prompts.jsonl --drafter none --prompt hello": "config.json: missing",
    "generate --target target --drafter ./nothing --prompt hello": "'./nothing': no such",
    "generate --target target --drafter m.gguf --prompt hello": "m.gguf: not a folder",
    f"{PLAIN} --prompts prompts.jsonl": "either --prompt TEXT or --prompts FILE",
    f"{PLAIN} --compare": "--compare",
    f"{PLAIN} --frobnicate": "--frobnicate",
    f"{PLAIN} --dtype int8": "--dtype",
    f"{PLAIN} --mesh 2by2": "--mesh",
    f"{PLAIN} --mesh 4": "--mesh",
    f"{PLAIN} --mesh 0x2": "mesh sizes must be at least 1",
    f"{PLAIN} --mesh 4x100": "needs 400 devices",
    f"{PLAIN} --mesh 1x8": "does not divide",
    f"{PLAIN} --json nowhere/x.json": "nowhere/x.json",
    f"{PLAIN} --json target": "target: is a folder",
    "convert drafter out --layout nope": "safeailab",
    "convert drafter --layout vllm": "DST",
    "convert drafter target/config.json/out --layout vllm": "cannot write",
    "convert drafter target --layout vllm": "target: exists already",
    "convert drafter m.gguf --layout vllm --overwrite": "m.gguf",
    "convert drafter out --layout vllm --source-layout nope": "nope",
    "convert drafter out --layout vllm --capture-layers 3,2,1": "[3, 2, 1]",
    "convert drafter out --layout vllm --capture-layers a,b": "--capture-layers",
    "inspect drafter/model.safetensors": "not a folder",
    "diff drafter nothing": "'nothing': no such",
    "frobnicate": "frobnicate",
} | {
    f"{PLAIN} {option} {value}": option
    for option in ("--max-new-tokens", "--num-draft-tokens", "--batch-size", "--limit", "--prefill-chunk")
    for value in ("0", "-3", "many")
}

Case = tuple[Callable[[], object], str, str]  # what changes a file, the command, words of the message
CASES: dict[str, Case] = {
    f"{command.split()[0]}: {name}": (change, command, words)
    for command in ("inspect drafter", CONVERT, "diff drafter drafter", GENERATE)
    for name, (change, words) in DRAFTERS.items()
}
CASES |= {f"target: {name}": (change, GENERATE, words) for name, (change, words) in TARGETS.items()}
CASES |= {
    f"gguf: {name}": (change, PLAIN.replace("target target", "target m.gguf"), words)
    for name, (change, words) in GGUFS.items()
}
CASES |= {
    f"prompts: {name}": (partial(PROMPTS.write_bytes, content), GENERATE, words)
    for name, (content, words) in LINES.items()
}
CASES |= {command.encode(errors="replace").decode()[:80]: (int, command, words) for command, words in COMMANDS.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    target_folder(folder / TARGET)
    drafter_folder(folder / DRAFT)
    write_gguf(folder / GGUF)
    (folder / PROMPTS).write_bytes(LINE)
    return folder


@pytest.fixture
def folder(good, tmp_path, monkeypatch):
    """The current folder, holding good files."""
    folder = tmp_path / "here"
    shutil.copytree(good, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    return folder


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Everything below a folder, hidden files included."""
    return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def assert_one_line(code: int, capsys, expected_code: int, words: str) -> None:
    out, err = capsys.readouterr()
    assert code == expected_code and out == ""
    assert err.startswith("eagle-jax: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert words in err and "Traceback" not in err, err


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_changes_nothing(folder, capsys, name):
    change, command, words = CASES[name]
    change()
    before = contents(folder)
    capsys.readouterr()
    code = main(command.split(" "))
    assert_one_line(code, capsys, 2, words)
    assert contents(folder) == before


@pytest.mark.parametrize("command", [GENERATE, CONVERT, "inspect drafter", "diff drafter drafter"])
@pytest.mark.parametrize("closed", ["drafter", "drafter/config.json", "drafter/model.safetensors"])
def test_files_that_may_not_be_read(folder, capsys, command, closed):
    (folder / closed).chmod(0)
    if os.access(folder / closed, os.R_OK):
        pytest.skip("the administrator may read everything")
    code = main(command.split(" "))
    (folder / closed).chmod(0o755)
    assert_one_line(code, capsys, 2, closed)


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL_DISK, KeyboardInterrupt()], ids=["full disk", "ctrl-c"])
@pytest.mark.parametrize("occupied", [False, True])
@pytest.mark.parametrize("command", [CONVERT + " --overwrite -q", "inspect drafter -q --json out.json"])
def test_a_write_that_ends_half_way(folder, capsys, monkeypatch, command, occupied, error):
    """What was there stays, and nothing new appears, temporary or not."""
    if occupied:
        shutil.copytree("drafter", "out")
        Path("out.json").write_text("{}")
    writes = 0

    def write(file, *rest) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            raise error
        file.write(b"half")

    def dump(value, file, **options) -> None:
        file.write("{")
        raise error

    before = contents(folder)
    owner, name, replacement = (json, "dump", dump)
    if command.startswith("convert"):
        owner, name, replacement = (safetensors_file, "_write_array", write)
    monkeypatch.setattr(owner, name, replacement)
    code = main(command.split())
    words = "out" if error is FULL_DISK else "interrupted"
    assert_one_line(code, capsys, 2 if error is FULL_DISK else 130, words)
    assert contents(folder) == before


def test_ctrl_c_while_decoding(folder, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "generate", interrupted)
    before = contents(folder)
    assert_one_line(main(GENERATE.split()), capsys, 130, "interrupted")
    assert contents(folder) == before


def test_any_refusal_of_the_system_is_one_line(folder, capsys, monkeypatch):
    """Also where nobody expected one."""

    def refused(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "some/file")

    monkeypatch.setattr("eagle_jax.checkpoint.hub.resolve", refused)
    assert_one_line(main(["inspect", "drafter"]), capsys, 2, "some/file: Permission denied")
