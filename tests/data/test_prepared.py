"""From chats to token ids on disk, and what cannot be used."""

import json

import numpy as np
import pytest
from cli_models import write_tokenizer

from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.data.masks import MaskError, encode_training_chat
from eagle_jax.data.packing import PackedBatches
from eagle_jax.data.prepared import PreparedData, PrepareOptions, prepare, tokenizer_fingerprint
from eagle_jax.data.records_file import RecordWriter
from eagle_jax.errors import CheckpointError, InputError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def messages(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


CHATS = [messages("hi", "hello"), messages("a", "b", "c", "d" * 30), messages("x" * 80, "far away"), messages("q", "r")]


def write(path, chats=CHATS, extra=""):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in chats) + extra)
    return path


def test_records_are_the_encoded_chats(tokenizer, tmp_path):
    seen = []
    source = write(tmp_path / "chats.jsonl", extra="{\n")
    report = prepare(
        [source, source], tmp_path / "data", tokenizer, PrepareOptions(60), progress=lambda r: seen.append(r.chats)
    )
    assert (report.chats, report.skipped, report.refused, report.dropped, report.cut, report.records) == (
        8,
        2,
        0,
        2,
        2,
        6,
    )
    assert seen == [*range(1, 9)] and "not valid JSON" in report.problems[0]
    data = PreparedData(tmp_path / "data", tokenizer)
    assert len(data) == 6 and data.summary["answer_tokens"] == report.answer_tokens
    expected = [encode_training_chat(tokenizer, chat) for chat in (CHATS[0], CHATS[1], CHATS[3])] * 2
    for i, chat in enumerate(expected):
        np.testing.assert_array_equal(data[i]["tokens"], chat.tokens[:60])
        np.testing.assert_array_equal(data[i]["mask"], chat.mask[:60])
        assert data.index["length"][i] == min(len(chat.tokens), 60)
        assert data.index["first_answer"][i] == np.argmax(chat.mask)
    assert report.tokens == sum(len(data[i]["tokens"]) for i in range(6)) == data.index["length"].sum()
    assert data.metadata["max_length"] == 60 and [s["name"] for s in data.metadata["sources"]] == ["chats.jsonl"] * 2
    assert PackedBatches(data, length=64, batch_size=1, seed=0).num_tokens == report.tokens


def test_which_turns(tokenizer, tmp_path):
    source = write(tmp_path / "chats.jsonl", [CHATS[1]])
    lengths = {}
    for turns in ("all", "last", "each"):
        prepare([source], tmp_path / turns, tokenizer, PrepareOptions(1000, turns=turns))
        data = PreparedData(tmp_path / turns)
        lengths[turns] = [(len(data[i]["tokens"]), int(data[i]["mask"].sum())) for i in range(len(data))]
    (whole, both), (_, last) = lengths["all"][0], lengths["last"][0]
    assert last == 31 and both == last + 2
    assert lengths["each"] == [(len(encode_training_chat(tokenizer, CHATS[1][:2]).tokens), 2), (whole, last)]


def test_unfinished_answers_keep_what_was_emitted(tokenizer, tmp_path):
    lines = [{"messages": CHATS[1], "generation": {"finish_reason": reason}} for reason in ("stop", "length")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for turns, differ in (("all", [1]), ("each", [0, 1])):
        prepare([tmp_path / "chats.jsonl"], tmp_path / turns, tokenizer, PrepareOptions(100, turns=turns))
        data = PreparedData(tmp_path / turns)
        half = len(data) // 2
        counts = [int(data[i]["mask"].sum()) for i in range(len(data))]
        assert [a - b for a, b in zip(counts[:half], counts[half:], strict=True)] == differ


def test_a_chat_that_the_template_refuses_is_counted(tokenizer, tmp_path):
    refusing = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + tokenizer.chat_template
    original, tokenizer.chat_template = tokenizer.chat_template, refusing
    try:
        source = write(tmp_path / "chats.jsonl")
        report = prepare([source], tmp_path / "data", tokenizer, PrepareOptions(200))
        assert (report.refused, report.records) == (1, 3)
        assert "chats.jsonl: chat 'line-2': the chat template refuses this conversation: one turn" in report.problems[0]
        with pytest.raises(InputError, match=r"chat 'line-2'.*one turn only"):
            prepare([source], tmp_path / "strict", tokenizer, PrepareOptions(200), strict=True)
        tokenizer.chat_template = "{% if %}"
        with pytest.raises(InputError, match=r"refuses 4, .*the first problem: .*chat 'line-1'"):
            prepare([source], tmp_path / "broken", tokenizer, PrepareOptions(200))
        tokenizer.chat_template = original.split("{% if")[0]
        with pytest.raises(MaskError, match="chat 'line-1': the chat template ignores add_generation_prompt"):
            prepare([source], tmp_path / "unclear", tokenizer, PrepareOptions(200))
    finally:
        tokenizer.chat_template = original
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "data"]


def test_a_part_of_a_file(tokenizer, tmp_path):
    source = write(tmp_path / "chats.jsonl")
    tokens = {}
    for name, options in (
        ("all", {}),
        ("first", {"limit": 1}),
        ("rest", {"skip": 1}),
        ("second", {"skip": 1, "limit": 1}),
    ):
        prepare([source], tmp_path / name, tokenizer, PrepareOptions(200, **options))
        data = PreparedData(tmp_path / name)
        tokens[name] = [data[i]["tokens"].tolist() for i in range(len(data))]
    assert tokens["first"] + tokens["rest"] == tokens["all"] and tokens["second"] == tokens["all"][1:2]
    for options in ({"skip": -1}, {"limit": 0}):
        with pytest.raises(InputError, match="skip must be at least 0 and limit 1"):
            prepare([source], tmp_path / "none", tokenizer, PrepareOptions(200, **options))
    with pytest.raises(InputError, match="nothing to train on"):
        prepare([source], tmp_path / "none", tokenizer, PrepareOptions(200, skip=4))


def test_bad_input_leaves_nothing(tokenizer, tmp_path):
    source = write(tmp_path / "chats.jsonl")
    for options, message in (
        (PrepareOptions(1), "at least 2"),
        (PrepareOptions(10), "nothing to train on in 4 chats: .* 4 have no answer within 10 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            prepare([source], tmp_path / "data", tokenizer, options)
    with pytest.raises(InputError, match=r"absent.jsonl: cannot read"):
        prepare([source, tmp_path / "absent.jsonl"], tmp_path / "data", tokenizer, PrepareOptions(100))
    write(tmp_path / "empty.jsonl", [])
    with pytest.raises(InputError, match=r"empty.jsonl: holds no usable chat"):
        prepare([tmp_path / "empty.jsonl"], tmp_path / "data", tokenizer, PrepareOptions(100))
    with pytest.raises(InputError, match=r"chats\.jsonl:5: not valid JSON"):
        prepare([write(source, extra="{")], tmp_path / "data", tokenizer, PrepareOptions(100), strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "empty.jsonl"]


def test_data_of_another_tokenizer_or_kind(tokenizer, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    write_tokenizer(folder)
    same, longer = load_tokenizer(folder), load_tokenizer(folder)
    assert tokenizer_fingerprint(same) == tokenizer_fingerprint(tokenizer)
    prepare([write(tmp_path / "chats.jsonl")], tmp_path / "data", tokenizer, PrepareOptions(100))
    longer.add_tokens(["<new>"])
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    for changed in (longer, load_tokenizer(folder)):
        with pytest.raises(InputError, match=r"is of another tokenizer \(259 tokens"):
            PreparedData(tmp_path / "data", changed)
    with RecordWriter(tmp_path / "features", {"kind": "features", "version": 1}) as writer:
        writer.append({"aux": np.zeros(3)})
    with pytest.raises(CheckpointError, match="holds features of version 1, expected tokenized chats of version 1"):
        PreparedData(tmp_path / "features")
