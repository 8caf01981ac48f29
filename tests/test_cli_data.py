"""`eagle-jax data ...`: from prompts to token ids and a draft vocabulary, and what bad input does."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from cli_models import VOCAB, drafter_folder, target_folder
from jax.experimental.compilation_cache import compilation_cache

from eagle_jax.cli import main
from eagle_jax.data import vocabulary
from eagle_jax.data.prepared import PreparedData
from eagle_jax.data.training_rows import training_rows

PROMPTS = [{"id": str(i), "category": "qa", "turns": [f"why {i}?"]} for i in range(5)]
REGENERATE = (
    "data regenerate --target target --prompts prompts.jsonl --max-new-tokens 8 --batch-size 4 --keep-unfinished"
)
_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and a drafter; what is compiled is kept for this file only, since those settings are the process's."""
    folder = tmp_path_factory.mktemp("models")
    target_folder(folder / "target")
    drafter_folder(folder / "drafter")
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        compilation_cache.reset_cache()
        yield folder
    jax.config.update("jax_disable_most_optimizations", False)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def run(models, tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with `target`, `drafter`, `prompts.jsonl`: (code, stdout, stderr, --json's value)."""
    monkeypatch.chdir(tmp_path)
    for name in ("target", "drafter"):
        (tmp_path / name).symlink_to(models / name)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))

    def run(command):
        capsys.readouterr()
        code = main([*command.split(), "--json", "result.json"])
        out, err = capsys.readouterr()
        result = tmp_path / "result.json"
        value = json.loads(result.read_text()) if result.exists() else None
        result.unlink(missing_ok=True)
        return code, out, err, value

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def chats(path, n=6):
    texts = [(f"question {i}", "abc" * (i + 1)) for i in range(n)]
    messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in texts]
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages) + "{\n")


def test_prompts_to_training_rows(run, tmp_path):
    code, out, err, result = run(f"{REGENERATE} --output chats.jsonl")
    assert code == 0 and err == "" and f"{result['written']:,} chats to chats.jsonl" in out
    assert result["written"] + sum(result["left_out"].values()) == 5 and result["tokens_per_second"] > 0
    lines = lines_of(tmp_path / "chats.jsonl")
    assert all(line["generation"]["model"] == "target" and line["generation"]["temperature"] == 0 for line in lines)

    written = (tmp_path / "chats.jsonl").read_bytes()
    (tmp_path / "chats.jsonl").write_bytes(written[: len(written) // 2])  # as a killed run leaves it
    code, _, _, again = run(f"{REGENERATE} --output chats.jsonl -q")
    assert code == 0 and again["resumed"] + again["written"] == result["written"]
    by_id = lambda line: line["id"]  # noqa: E731
    assert sorted(lines_of(tmp_path / "chats.jsonl"), key=by_id) == sorted(lines, key=by_id)

    code, out, err, report = run("data prepare chats.jsonl --target target -o data --max-length 60")
    assert code == 0 and report["records"] == len(lines) and "answer tokens" in out
    batch = next(training_rows("data", length=64, batch_size=2, seed=0))
    assert batch["tokens"].shape == (2, 64) and batch["mask"].any()

    code, out, err, chosen = run("data vocab data --target target --size 40 --output vocabulary.json")
    found = vocabulary.load(tmp_path / "vocabulary.json", vocab_size=VOCAB)
    assert code == 0 and found.size == chosen["size"] == 40 and found.coverage == chosen["coverage"]
    assert f"{found.coverage:.2%} of the answers' tokens" in out and set(chosen["kept_tokens"]) <= {*found.ids.tolist()}
    assert found.data == PreparedData("data").fingerprint


def test_a_drafter_changes_no_answer(run, tmp_path):
    run(f"{REGENERATE} --output plain.jsonl -q")
    code, _, err, _ = run(f"{REGENERATE} --output drafted.jsonl --drafter drafter -q")
    assert code == 0, err
    assert lines_of(tmp_path / "drafted.jsonl") == lines_of(tmp_path / "plain.jsonl")


def test_shards_divide_the_prompts(run, tmp_path):
    for i in range(2):
        assert run(f"{REGENERATE} --output c.jsonl --shard {i}/2 --temperature 1 --seed 7 -q")[0] == 0
    parts = [lines_of(tmp_path / f"c-0000{i}-of-00002.jsonl") for i in range(2)]
    assert {line["id"] for line in parts[0]} <= {"0", "2", "4"} and {line["id"] for line in parts[1]} <= {"1", "3"}


def test_prepare_options(run, tmp_path):
    chats(tmp_path / "chats.jsonl")
    template = "{% for m in messages %}[{{ m['role'] }}|{{ flavour }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant|{{ flavour }}]{% endif %}"
    (tmp_path / "template.jinja").write_text(template)
    options = "--chat-template template.jinja --template-option flavour=plain --skip 1 --limit 3 --turns last"
    code, _, err, report = run(f"data prepare chats.jsonl --target target -o data {options}")
    data = PreparedData("data")
    assert (
        code == 0 and len(data) == 3 == report["records"] and data.metadata["template_options"] == {"flavour": "plain"}
    )
    code, _, err, _ = run("data prepare chats.jsonl --target target -o data")
    assert code == 2 and "exists already" in err
    code, _, err, _ = run("data prepare chats.jsonl --target target -o data --overwrite")
    assert (
        code == 0
        and "warning: chats.jsonl:7: not valid JSON" in err.replace("\n", " ")
        and len(PreparedData("data")) == 6
    )
    np.testing.assert_array_equal(PreparedData("data").index["length"] > 0, True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("data regenerate --target target --output o.jsonl", "Missing option '--prompts'"),
        ("data regenerate --target absent --prompts prompts.jsonl --output o.jsonl", "'absent': no such file"),
        ("data regenerate --target target --prompts absent.jsonl --output o.jsonl", "absent.jsonl: cannot read"),
        (f"{REGENERATE} --output absent/o.jsonl", "absent/o.jsonl: cannot be written: absent is no folder"),
        (f"{REGENERATE} --output target", "target: cannot be written: it is a folder"),
        (f"{REGENERATE} --output o.jsonl --temperature -1", "Invalid value for '--temperature'"),
        (f"{REGENERATE} --output o.jsonl --temperature nan", "--temperature"),
        (f"{REGENERATE} --output o.jsonl --drafter drafter --temperature 1", "--drafter speeds up greedy answers only"),
        (f"{REGENERATE} --output o.jsonl --shard 2/2", "--shard: expected I/N"),
        (f"{REGENERATE} --output o.jsonl --shard x", "--shard: expected numbers like 0/4, found 'x'"),
        (f"{REGENERATE} --output o.jsonl --template-option x", "expected KEY=VALUE like enable_thinking=false"),
        (f"{REGENERATE} --output o.jsonl --chat-template absent", "absent: cannot read"),
        (f"{REGENERATE} --output prompts.jsonl", "prompts.jsonl:1: is not a generated chat"),
        ("data synthesize --target target --output o.jsonl --count 0", "Invalid value for '--count'"),
        ("data synthesize --target target --output o.jsonl --count 1 --user-temperature 0", "must be above 0"),
        ("data prepare absent.jsonl --target target -o d", "absent.jsonl: cannot read"),
        ("data prepare prompts.jsonl --target target -o d", "holds no usable chat"),
        ("data prepare chats.jsonl --target target -o d --strict", "chats.jsonl:7: not valid JSON"),
        ("data prepare chats.jsonl --target target -o d --turns some", "Invalid value for '--turns'"),
        ("data prepare chats.jsonl --target target -o d --template-option tools=1", "not the template's to choose"),
        ("data prepare chats.jsonl --target target -o d --max-length 5", "nothing to train on in 6 chats"),
        ("data vocab absent --target target --size 9 -o v.json", "absent/metadata.json: cannot read"),
        ("data", "Missing command"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, command, message):
    chats(tmp_path / "chats.jsonl")
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, err, result = run(command) if command != "data" else (main(["data"]), "", message, None)
    assert code == 2 and message in err and len(err.splitlines()) == 1 and result is None
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_vocabulary_sizes(run, tmp_path):
    chats(tmp_path / "chats.jsonl")
    run("data prepare chats.jsonl --target target -o data -q")
    for size in (0, -1, VOCAB + 1):
        code, _, err, _ = run(f"data vocab data --target target --size {size} -o v.json")
        assert code == 2 and len(err.splitlines()) == 1 and not (tmp_path / "v.json").exists()


def test_synthesize_says_when_nothing_passes(run, tmp_path):
    code, _, err, _ = run(
        "data synthesize --target target --output o.jsonl --count 1 --batch-size 2 --max-user-tokens 4"
    )
    assert code == 2 and "100 attempts gave 0 chats; left out: " in err and not (tmp_path / "o.jsonl").exists()
