"""Tokenizers inside GGUF files."""

import pytest
from tiny_gguf import MERGES, tokens, write_gguf

from eagle_jax.checkpoint.gguf import GgufSource
from eagle_jax.checkpoint.gguf_tokenizer import read_tokenizer
from eagle_jax.errors import CheckpointError


@pytest.fixture
def make(tmp_path):
    def make(**options):
        write_gguf(tmp_path / "model.gguf", **options)
        return read_tokenizer(GgufSource(tmp_path / "model.gguf"))

    return make


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def test_special_tokens_and_template(make):
    tokenizer = make()
    assert len(tokenizer) == len(tokens())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (
        1,
        2,
        0,
        2,
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhello\nassistant\n"


def test_user_defined_tokens_stay_whole_and_visible(make):
    tokenizer = make()
    ids = tokenizer.encode("hello<think> w")
    assert len(tokens()) - 1 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<think> w"


@pytest.mark.parametrize(
    "text", ["", "hello  world\n\n 12", "naïve 日本語 🦜🏽", "\x00\x7f\u200b", "<|im_end|> x", "e\u0301"]
)
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "gpt-2", "default"])
def test_decoding_inverts_encoding(make, text, pre):
    tokenizer = make(pre=pre)
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


# How each style cuts "hello w12\n\n 1"; the vocabulary knows hello, Ġw, 12, ĊĠ and ĊĊĠ.
CUTS = {
    "smollm": ["hello", "Ġw", "1", "2", "ĊĊĠ", "1"],
    "gpt-2": ["hello", "Ġw", "12", "Ċ", "Ċ", "Ġ", "1"],
    "llama-bpe": ["hello", "Ġw", "12", "Ċ", "Ċ", "Ġ", "1"],
    "qwen2": ["hello", "Ġw", "1", "2", "Ċ", "Ċ", "Ġ", "1"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_each_style_cuts_words_its_own_way(make, pre):
    assert pieces(make(pre=pre, metadata={"tokenizer.ggml.add_bos_token": False}), "hello w12\n\n 1") == CUTS[pre]


def test_llama_takes_whole_words_without_merging(make):
    # "Ġhello" is a token that no merge makes.
    vocabulary = [*tokens()[:-1], "Ġhello", "<think>"]
    kinds = [3] * 3 + [1] * (len(vocabulary) - 4) + [4]
    metadata = {"tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.token_type": kinds}
    assert pieces(make(pre="llama-bpe", metadata=metadata), " hello") == ["Ġhello"]
    assert pieces(make(pre="gpt-2", metadata=metadata), " hello") == ["Ġ", "hello"]


def test_qwen_normalises(make):
    tokenizer = make(pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_start_and_end_tokens(make):
    assert make(metadata={"tokenizer.ggml.add_bos_token": True}).encode("hello")[0] == 1
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ids = make(metadata=both).encode("hello")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    # Llama 3's tokenizer starts every text unless the file says otherwise; others do not.
    unset = {"tokenizer.ggml.add_bos_token": None}
    assert make(pre="llama-bpe", metadata=unset).encode("hello")[0] == 1
    assert make(metadata=unset).encode("hello")[0] != 1


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"ggml\.model: 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, r"ggml\.pre: 'tekken' is not supported"),
        ({"tokenizer.ggml.tokens": None}, r"ggml\.tokens: missing"),
        ({"tokenizer.ggml.merges": None}, r"ggml\.merges: missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "each of them once"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "must be strings"),
        ({"tokenizer.ggml.merges": [*MERGES, "q q"]}, r"entry 9 \('q q'\) does not join"),
        ({"tokenizer.ggml.merges": ["hello"]}, "does not join"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 entries for"),
        ({"tokenizer.ggml.eos_token_id": 99999}, r"eos_token_id: 99999 is outside"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "asks for a token"),
        ({"tokenizer.chat_template": 3}, "expected str, found int"),
    ],
)
def test_refusals_name_the_key(make, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        make(metadata=metadata)
