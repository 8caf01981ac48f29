"""Prompt files."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_jax.data.prompts import Prompt, read_prompts
from eagle_jax.errors import InputError

SHARED = Path(__file__).parents[3] / "shared" / "data"
GOOD = '{"id": "a", "category": "math", "turns": ["1 + 1?", "And 2 + 2?"]}\n'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompts.jsonl"


def test_reads_what_is_written(path):
    path.write_text(GOOD + '{"id": 7, "turns": ["日本語 🦜"]}\n', encoding="utf-8")
    assert read_prompts(path) == [Prompt("a", "math", ("1 + 1?", "And 2 + 2?")), Prompt("7", None, ("日本語 🦜",))]


def test_benchmark_files_read_as_they_are(path):
    line = {"question_id": 81, "category": "writing", "turns": ["Write."], "reference": ["x"], "source": {"n": 1}}
    path.write_text(json.dumps(line))
    assert read_prompts(path) == [Prompt("81", "writing", ("Write.",))]


@pytest.mark.parametrize("text", ["\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), "\n  \n" + GOOD + "\n", GOOD.strip()])
def test_harmless_differences_of_files(path, text):
    path.write_bytes(text.encode())
    assert [p.id for p in read_prompts(path)] == ["a"]


def test_limit_stops_reading(path):
    path.write_text("".join(json.dumps({"id": i, "turns": ["x"]}) + "\n" for i in range(5)) + "not json")
    assert [p.id for p in read_prompts(path, limit=3)] == ["0", "1", "2"]
    with pytest.raises(InputError, match=r"prompts\.jsonl:6: not valid JSON"):
        read_prompts(path)
    for limit in (0, -1):
        with pytest.raises(InputError, match="at least 1"):
            read_prompts(path, limit=limit)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "expected an object like .*found list"),
        (b'{"turns": ["x"]}', r"id \(or question_id\) must be"),
        (b'{"id": "", "turns": ["x"]}', "id"),
        (b'{"id": true, "turns": ["x"]}', "id"),
        (b'{"id": 1.5, "turns": ["x"]}', "id"),
        (b'{"id": "b"}', "turns must be a list of at least one text, found nothing"),
        (b'{"id": "b", "turns": []}', "turns must be a list"),
        (b'{"id": "b", "turns": "x"}', "turns must be a list"),
        (b'{"id": "b", "turns": ["x", ""]}', r"turns\[1\] must be a text that is not empty"),
        (b'{"id": "b", "turns": [" \\n"]}', r"turns\[0\]"),
        (b'{"id": "b", "turns": [3]}', r"turns\[0\]"),
        (b'{"id": "b", "turns": ["\\ud83e"]}', "surrogate"),
        (b'{"id": "b", "category": 3, "turns": ["x"]}', "category must be a string"),
        (b'{"id": "a", "turns": ["x"]}', "'a' was used on line 1; ids must be unique"),
        (b'{"id": "b", "turns": ["\xff"]}', "not UTF-8 .byte 24"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_lines_are_named(path, line, message):
    path.write_bytes(GOOD.encode() + b"\n" + line + b"\n")
    with pytest.raises(InputError, match=rf"prompts\.jsonl:3: .*{message}") as error:
        read_prompts(path)
    assert len(str(error.value)) < 400 + len(str(path))


def test_files_without_prompts(path, tmp_path):
    for content in ("", "\n\n"):
        path.write_text(content)
        with pytest.raises(InputError, match=r"holds no prompt; expected lines like \{\"id\""):
            read_prompts(path)
    with pytest.raises(InputError, match="cannot read: No such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="cannot read: Is a directory"):
        read_prompts(tmp_path)


def test_long_files_are_read_line_by_line(path):
    with path.open("w") as file:
        for i in range(20_000):
            file.write(json.dumps({"id": i, "turns": ["word " * 50]}) + "\n")
    assert len(read_prompts(path)) == 20_000
    assert len(read_prompts(path, limit=2)) == 2


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)))
def test_any_line_is_a_prompt_or_an_input_error(path, content):
    line = content if isinstance(content, bytes) else json.dumps({"id": content, "turns": content}).encode()
    path.write_bytes(line)
    try:
        assert read_prompts(path)
    except InputError as error:
        assert str(path) in str(error)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
def test_shared_files():
    for file in sorted(SHARED.glob("*.jsonl")):
        assert len(read_prompts(file)) == sum(1 for line in file.open(encoding="utf-8") if line.strip())
