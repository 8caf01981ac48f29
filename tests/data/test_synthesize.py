"""Chats from a model alone: sampled user turns, filters, duplicates, continuing."""

import json

import pytest
import tiny
from cli_models import VOCAB, write_tokenizer

from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.data.chat_output import ChatOutput
from eagle_jax.data.masks import Template
from eagle_jax.data.regenerate import AnswerOptions, AnswerReport
from eagle_jax.data.sampling_loop import Sampler
from eagle_jax.data.synthesize import SynthesisOptions, UserTurns, synthesize, text_key, unusable
from eagle_jax.errors import InputError
from eagle_jax.results import GenerateResult, RowResult

SETTINGS = {"model": "tiny", "seed": 3}
ANSWERS = AnswerOptions(30, batch_size=4, seed=3)
OPTIONS = SynthesisOptions(min_characters=6, max_characters=60)
TEXTS = [
    "how old is the sun?", "How old is the Sun", "hm", "why is the sky blue?", "tell me <|im_start|> a story",
    "name a river in Asia", "x" * 61, "bell \x07 rings here", "list three fruits", "never ends and",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


class Scripted:
    """User turns by the seed's rank among all seeds met, answers "yes"."""

    def __init__(self, tokenizer):
        self.tokenizer, self.users, self.prompts = tokenizer, {}, []
        self.config = tiny.target_config(vocab_size=VOCAB, max_position=400)

    def sample(self, prompts, *, temperature, seeds, max_new_tokens, eos_token_ids=None, batch_size=None):
        rows = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            text = self.tokenizer.decode(prompt)
            self.prompts.append(text)
            said, finished = "yes", True
            if text.endswith("<|im_start|>user\n"):
                assert temperature == OPTIONS.temperature and eos_token_ids == [2]
                rank = self.users.setdefault(seed, len(self.users))
                said = TEXTS[rank] if rank < len(TEXTS) else f"question number {rank}"
                finished = not said.startswith("never")
            rows.append(
                RowResult(
                    [*self.tokenizer.encode(said), *([2] if finished else [])],
                    "stop" if finished else "length",
                    1,
                    [],
                    [],
                )
            )
        return GenerateResult(rows, 0.1)


def run(path, sampler, tokenizer, count, options=OPTIONS, **more):
    with ChatOutput(path, SETTINGS) as output:
        report = synthesize(count, output, sampler, tokenizer, options, ANSWERS, **more)
    return report, [json.loads(line) for line in path.read_text().splitlines()]


def test_filters_duplicates_and_exact_counts(tokenizer, tmp_path):
    report, lines = run(tmp_path / "out.jsonl", Scripted(tokenizer), tokenizer, 6)
    asked = [line["messages"][0]["content"] for line in lines]
    assert asked[:4] == [TEXTS[i] for i in (0, 3, 5, 8)] and len(asked) == 6 == report.written
    assert {line["messages"][1]["content"] for line in lines} == {"yes"}
    assert report.left_out == {
        "duplicate": 1, "too short": 1, "special tokens": 1, "too long": 2, "not printing": 1
    }  # fmt: skip
    assert [line["id"] for line in lines[:4]] == [f"synthetic-3-{i}" for i in (0, 3, 5, 8)]
    assert lines[0]["generation"] == SETTINGS | {"finish_reason": "stop", "answer_tokens": 4}


def test_an_interrupted_run_makes_no_attempt_twice(tokenizer, tmp_path):
    _, whole = run(tmp_path / "whole.jsonl", Scripted(tokenizer), tokenizer, 9)
    scripted = Scripted(tokenizer)
    run(tmp_path / "out.jsonl", scripted, tokenizer, 4)
    first = {line["id"] for line in whole[:4]}
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b'{"id": "synth')
    report, lines = run(tmp_path / "out.jsonl", scripted, tokenizer, 9)
    assert report.resumed == 4 and len({line["id"] for line in lines}) == 9
    assert {line["id"] for line in lines[:4]} == first
    assert len({text_key(line["messages"][0]["content"]) for line in lines}) == 9
    assert run(tmp_path / "out.jsonl", scripted, tokenizer, 9)[0].written == 0


def test_shards_make_different_attempts(tokenizer, tmp_path):
    ids = []
    for i in range(2):
        _, lines = run(tmp_path / f"{i}.jsonl", Scripted(tokenizer), tokenizer, 3, shard=(i, 2))
        ids += [int(line["id"].rsplit("-", 1)[1]) for line in lines]
        assert all(number % 2 == i for number in ids[-3:])
    assert len(set(ids)) == 6


def test_later_turns_and_a_system_message(tokenizer, tmp_path):
    scripted = Scripted(tokenizer)
    options = SynthesisOptions(turns=2, min_characters=6, max_characters=60, system="ask about nature")
    _, lines = run(tmp_path / "out.jsonl", scripted, tokenizer, 3, options)
    roles = [[message["role"] for message in line["messages"]] for line in lines]
    assert all(r[:3] == ["system", "user", "assistant"] for r in roles) and max(map(len, roles)) == 5
    assert scripted.prompts[0] == "<|im_start|>system\nask about nature<|im_end|>\n<|im_start|>user\n"
    assert any(prompt.count("assistant\nyes<|im_end|>") == 1 for prompt in scripted.prompts)


def test_a_random_target_only_stutters(tokenizer, tmp_path):
    """A real sampler end to end: hardly a text of random bytes passes, and the run says so instead of going on."""
    sampler = Sampler(tiny.target(num_layers=1, vocab_size=VOCAB, max_position=128), prefill_chunk=32)
    options = SynthesisOptions(max_new_tokens=8, min_characters=12)
    with pytest.raises(InputError, match=r"200 attempts gave 0 chats; left out: \d+ too "):
        run(tmp_path / "out.jsonl", sampler, tokenizer, 2, options)


def test_closings_that_are_text(tokenizer):
    original = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    try:
        users = UserTurns(Template(tokenizer), tokenizer, Scripted(tokenizer), OPTIONS)
    finally:
        tokenizer.chat_template = original
    assert tokenizer.decode(users.prompt([])) == "[INST]" and users.end_token_ids == [2]

    class Says:
        def sample(self, prompts, **_):
            return GenerateResult([RowResult(tokenizer.encode(" how are you? [/INST] fine"), "length", 1, [], [])], 0.1)

    users.sampler = Says()
    assert users.sample([[1]], [0], 1, AnswerReport()) == [("how are you?", "")]


def test_templates_and_options_that_cannot_be_used(tokenizer, tmp_path):
    original, tokenizer.chat_template = tokenizer.chat_template, "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    try:
        with pytest.raises(InputError, match="does not show a user's text as it is"):
            run(tmp_path / "out.jsonl", Scripted(tokenizer), tokenizer, 1)
    finally:
        tokenizer.chat_template = original
    for count, options, message in (
        (0, OPTIONS, "at least 1, found 0 and 1"),
        (1, SynthesisOptions(turns=0), "found 1 and 0"),
        (1, SynthesisOptions(temperature=0.0), "must be above 0"),
    ):
        with pytest.raises(InputError, match=message):
            run(tmp_path / "out.jsonl", Scripted(tokenizer), tokenizer, count, options)


def test_what_is_no_user_turn():
    options = SynthesisOptions()
    for text, problem in (
        ("What is the capital of France?", ""),
        ("日本の首都はどこですか、教えてください。", ""),
        ("Line one\n\tcode line two", ""),
        ("Hi", "too short"),
        ("x" * 2001, "too long"),
        ("broken \ufffd character here", "not printing"),
        ("zero\x00 byte in the text", "not printing"),
        ("I want to go " * 20, "repetitive"),
        ("ahahahah" * 40, "repetitive"),
    ):
        assert unusable(text, options) == problem


def test_duplicates_by_their_words():
    assert text_key("What IS  this?") == text_key("what is this") != text_key("what was this")
    assert text_key("?!") != text_key("...")
