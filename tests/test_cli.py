"""What `eagle-jax` prints, writes and returns, with a small random target."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from cli_models import drafter_folder, target_folder
from jax.experimental.compilation_cache import compilation_cache

from eagle_jax.checkpoint.layouts import WRITABLE
from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.cli import main
from eagle_jax.data.chat import encode_chat

TEXTS = {"a": "hello", "2": "why?", "7": "x"}  # of one bucket
N = 24
RESULT = {
    "id": str,
    "prompt_tokens": list,
    "output_tokens": list,
    "text": str,
    "finish_reason": str,
    "rounds": int,
    "accepted_per_position": list,
    "cut_per_position": list,
}
SUMMARY = {
    "output_tokens": int,
    "rounds": int,
    "mean_acceptance_length": float,
    "acceptance_per_position": list,
    "tokens_per_second": float,
    "compile_seconds": float,
    "num_compilations": int,
}
BASELINE = {"tokens_per_second": float, "identical_outputs": int, "total_outputs": int}


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs(tmp_path_factory):
    """Compiled quickly, and kept for this file only: these settings are the process's."""
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        compilation_cache.reset_cache()
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`target`, `drafter`, `prompts.jsonl`, and `ending`: the target with an end token that its answers reach."""
    folder = tmp_path_factory.mktemp("models")
    target_folder(folder / "target")
    drafter_folder(folder / "drafter")
    lines = [
        {"id": "a", "turns": [TEXTS["a"]]},
        {"id": 2, "category": "qa", "turns": [TEXTS["2"], "a second turn, which waits"]},
        {"question_id": 7, "turns": [TEXTS["7"]]},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(folder, capsys, tmp_path):
    """Runs a command in this process: (exit code, stdout, stderr, what --json wrote)."""

    def run(*arguments) -> tuple[int, str, str, dict | None]:
        capsys.readouterr()
        file = tmp_path / "result.json"
        file.unlink(missing_ok=True)
        code = main([*map(str, arguments), "--json", str(file)])
        out, err = capsys.readouterr()
        return code, out, err, json.loads(file.read_text()) if file.exists() else None

    return run


@pytest.fixture
def generate(folder, run):
    """Runs `generate` and returns (result, stdout, stderr)."""

    def generate(*arguments, target="target", drafter="drafter", prompts=True) -> tuple[dict, str, str]:
        given = ["--target", folder / target, "--drafter", drafter if drafter == "none" else folder / drafter]
        given += ["--max-new-tokens", N, *(["--prompts", folder / "prompts.jsonl"] if prompts else [])]
        code, out, err, result = run("generate", *given, *arguments)
        assert code == 0, err
        return result, out, err

    return generate


def check_fields(found: dict, expected: dict) -> None:
    """Exactly these fields, of these types."""
    assert {name: type(value) for name, value in found.items()} == expected


def tokens_of(result: dict) -> list[list[int]]:
    return [row["output_tokens"] for row in result["results"]]


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "target")


def test_generate_writes_what_is_documented(generate, tokenizer):
    # A batch is never wider than the prompts are many.
    result, out, err = generate("--batch-size", 1_000_000, "--num-draft-tokens", 3, "--compare")
    assert set(result) == {"results", "summary"}
    assert [row["id"] for row in result["results"]] == list(TEXTS)
    for row in result["results"]:
        check_fields(row, RESULT)
        assert row["prompt_tokens"] == encode_chat(tokenizer, TEXTS[row["id"]])
        assert row["text"] == tokenizer.decode(row["output_tokens"], skip_special_tokens=True)
        assert row["finish_reason"] == ("stop" if row["output_tokens"][-1] == 2 else "length")
        assert row["finish_reason"] == "stop" or len(row["output_tokens"]) == N
        assert len(row["accepted_per_position"]) == len(row["cut_per_position"]) == 3
        # The prefill gives one token; each round gives one and those it accepted, unless the answer ends within it.
        emitted = 1 + row["rounds"] + sum(row["accepted_per_position"])
        assert emitted - 1 <= len(row["output_tokens"]) <= emitted

    summary = result["summary"]
    baseline, speedup = summary.pop("baseline"), summary.pop("speedup")
    check_fields(summary, SUMMARY)
    check_fields(baseline, BASELINE)
    rows = result["results"]
    rounds = sum(row["rounds"] for row in rows)
    assert summary["rounds"] == rounds and summary["output_tokens"] == sum(map(len, tokens_of(result)))
    assert summary["mean_acceptance_length"] == (summary["output_tokens"] - len(rows)) / rounds
    accepted = [sum(column) for column in zip(*(row["accepted_per_position"] for row in rows), strict=True)]
    assert summary["acceptance_per_position"] == [count / rounds for count in accepted]
    assert summary["num_compilations"] == 1 and summary["compile_seconds"] > 0
    assert baseline["identical_outputs"] == baseline["total_outputs"] == 3
    assert speedup == summary["tokens_per_second"] / baseline["tokens_per_second"]

    assert "mean acceptance length" in out and "3 of 3 outputs identical" in out
    # A drafter that may have been trained to another meaning of norm_output is worth one line.
    assert err.startswith("warning: ") and err.count("\n") == 1


def test_progress_is_on_stderr(generate, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    _, out, err = generate("--batch-size", 3, "--num-draft-tokens", 3, "--compare")
    for text in ("Loading", "Answering", "Decoding plainly"):
        assert text in err and text not in out
    assert "mean acceptance length" in out and "mean acceptance length" not in err


def test_every_way_of_running_gives_the_same_tokens(generate):
    plain, out, _ = generate("--batch-size", 3, drafter="none")
    check_fields(plain["summary"], SUMMARY)
    assert plain["summary"]["acceptance_per_position"] == [] and plain["summary"]["mean_acceptance_length"] == 1.0
    assert "acceptance" not in out and "tokens per second" in out
    assert len({tuple(tokens) for tokens in tokens_of(plain)}) == 3
    expected = tokens_of(plain)
    for row in plain["results"]:
        check_fields(row, RESULT)
        assert row["accepted_per_position"] == row["cut_per_position"] == []
    counts = []
    for arguments in ((), ("--mesh", "1x2"), ("--mesh", "2x1"), ("--mesh", "1x2", "--replicate-drafter")):
        result, _, _ = generate("--batch-size", 3, "--num-draft-tokens", 3, *arguments)
        assert tokens_of(result) == expected, arguments
        counts.append([row["accepted_per_position"] for row in result["results"]])
    assert all(count == counts[0] for count in counts)


def test_a_prompt_streams_its_text(generate, tokenizer):
    result, out, err = generate("--prompt", TEXTS["a"], prompts=False)
    [row] = result["results"]
    text, table = out[: len(row["text"])], out[len(row["text"]) :]
    assert text == row["text"] and table.startswith("\n") and "mean acceptance length" in table
    assert row["id"] == "prompt" and row["prompt_tokens"] == encode_chat(tokenizer, TEXTS["a"])
    assert row["text"] not in err
    whole, _, _ = generate("--limit", 1)
    assert [row["id"] for row in whole["results"]] == ["a"] and tokens_of(whole) == tokens_of(result)
    quiet, out, err = generate("--prompt", TEXTS["a"], "-q", prompts=False)
    assert (out, err) == (row["text"] + "\n", "") and tokens_of(quiet) == tokens_of(result)


def test_end_tokens(generate, folder):
    """An end token that the answer reaches ends it, unless it is to be ignored."""
    free, _, _ = generate("--limit", 1, "--ignore-eos")
    [tokens] = tokens_of(free)
    assert len(tokens) == N and free["results"][0]["finish_reason"] == "length"
    end = tokens[N // 2]
    shutil.copytree(folder / "target", folder / "ending")
    (folder / "ending" / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    stopped, _, _ = generate("--limit", 1, target="ending")
    assert stopped["results"][0]["finish_reason"] == "stop"
    assert tokens_of(stopped) == [tokens[: tokens.index(end) + 1]]
    ignored, _, _ = generate("--limit", 1, "--ignore-eos", target="ending")
    assert tokens_of(ignored) == [tokens]


def test_an_answer_ends_with_the_context(generate):
    result, _, _ = generate("--limit", 1, "--ignore-eos", "--max-new-tokens", 10**12, drafter="none")
    [row] = result["results"]
    assert len(row["prompt_tokens"]) + len(row["output_tokens"]) == 128 and row["finish_reason"] == "length"


def test_bfloat16_and_quiet(generate):
    result, out, err = generate("--limit", 2, "--dtype", "bfloat16", "-q")
    assert (out, err) == ("", "") and len(result["results"]) == 2
    assert all(len(tokens) == N or tokens[-1] == 2 for tokens in tokens_of(result))


def test_convert_inspect_diff(run, folder, tmp_path):
    source = folder / "drafter"
    for layout in WRITABLE:
        code, out, err, report = run("convert", source, tmp_path / layout, "--layout", layout)
        assert code == 0 and err == "" and str(tmp_path / layout) in out
        assert (report["source_layout"], report["layout"]) == ("sglang", layout)
        code, out, err, report = run("inspect", tmp_path / layout)
        assert code == 0 and err == "" and report["layout"] == layout and report["captured_inputs"] == [1, 2, 3]
        assert report["kind"] == "eagle3.1" and report["kind"] in out
        code, out, err, report = run("diff", source, tmp_path / layout)
        assert code == 0 and err == "" and report["equal"] and out.splitlines()[-1] == "equal"

    assert run("convert", source, tmp_path / "half", "--layout", "vllm", "--dtype", "float16", "-q")[:3] == (0, "", "")
    code, out, err, report = run("diff", source, tmp_path / "half")
    assert code == 1 and err == "" and not report["equal"] and out.splitlines()[-1] == "different"
    assert "float32 and float16" in out
    for arguments, expected in ((("inspect", source), 0), (("diff", source, tmp_path / "half"), 1)):
        code, out, err, report = run(*arguments, "-q")
        assert (code, out, err) == (expected, "", "") and report


@pytest.mark.parametrize("columns", [70, 80, 120, None])
def test_tables_never_cut_a_name(run, folder, tmp_path, monkeypatch, columns):
    """None is a pipe, where nothing is left out."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _, report = run("inspect", folder / "drafter")
    assert "…" not in out
    for tensor in report["tensors"]:
        assert tensor["path"] in out
        assert columns in (70, 80) or all(name in out for name in tensor["stored"])
    run("convert", folder / "drafter", tmp_path / "half", "--layout", "vllm", "--dtype", "float16")
    _, out, _, report = run("diff", folder / "drafter", tmp_path / "half")
    assert "…" not in out and all(tensor["path"] in out for tensor in report["tensors"])
    if columns is not None:
        assert all(len(line.rstrip()) <= columns for line in out.splitlines())


def test_results_go_through_links_and_devices(folder, tmp_path, capfd):
    """Renaming a finished file onto /dev/stdout would replace the device."""
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert main(["inspect", str(folder / "drafter"), "-q", "--json", str(tmp_path / "link.json")]) == 0
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "real.json").read_text())
    assert main(["inspect", str(folder / "drafter"), "-q", "--json", "/dev/stdout"]) == 0
    assert json.loads(capfd.readouterr().out)["kind"] == "eagle3.1"
    assert Path("/dev/stdout").is_symlink()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from eagle_jax.cli import main\n"
        "codes = [main(a) for a in ([], ['--help'], ['generate', '--help'], ['inspect'])]\n"
        "heavy = {'jax', 'flax', 'numpy', 'transformers', 'torch', 'orbax'} & set(sys.modules)\n"
        "assert codes == [0, 0, 0, 2] and not heavy, (codes, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--num-draft-tokens" in done.stdout and done.stderr.count("\n") == 1


@pytest.mark.skipif(not (Path(sys.executable).parent / "eagle-jax").exists(), reason="the package is not installed")
def test_the_console_script(folder, tmp_path):
    script = Path(sys.executable).parent / "eagle-jax"
    done = subprocess.run([script, "inspect", tmp_path / "nothing"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("eagle-jax: ")
