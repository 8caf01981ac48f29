"""The target's own answers: what is asked, written, left out; and continuing after a kill."""

import json

import pytest
import tiny
from cli_models import VOCAB, write_tokenizer

from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.data.chat import encode_chat
from eagle_jax.data.chat_output import ChatOutput
from eagle_jax.data.chats import read_chats
from eagle_jax.data.regenerate import AnswerOptions, Request, read_requests, regenerate, row_seed, shard_of
from eagle_jax.data.sampling_loop import Sampler
from eagle_jax.errors import InputError

SETTINGS = {"model": "tiny", "temperature": 0.0, "seed": 0, "max_new_tokens": 6}
REQUESTS = [
    Request(f"r{i}", "math" if i % 2 else None, None, (f"what is the number {i} " + "so " * (i % 3),)) for i in range(7)
]
OPTIONS = AnswerOptions(6, batch_size=2, keep_unfinished=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def sampler():
    return Sampler(tiny.target(num_layers=1, vocab_size=VOCAB, max_position=256), prefill_chunk=128)


def run(path, sampler, tokenizer, requests=REQUESTS, options=OPTIONS, settings=SETTINGS, **more):
    with ChatOutput(path, settings) as output:
        report = regenerate(requests, output, sampler, tokenizer, options, **more)
    return report, [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_those_of_generate(tokenizer, sampler, tmp_path):
    report, lines = run(tmp_path / "out.jsonl", sampler, tokenizer)
    assert (report.requests, report.resumed, report.written + sum(report.left_out.values())) == (7, 0, 7)
    assert report.tokens > 0 and report.seconds > 0 and set(report.left_out) <= {"empty answer"}
    by_id = {line["id"]: line for line in lines}
    for request in REQUESTS[:3]:
        prompt = encode_chat(tokenizer, request.turns)
        row = sampler.generate([prompt], max_new_tokens=6, batch_size=2).rows[0]
        question, answer = by_id[request.id]["messages"]
        assert question == {"role": "user", "content": request.turns[0]}
        assert answer["content"] == tokenizer.decode(row.tokens, skip_special_tokens=True)
        generation = SETTINGS | {"finish_reason": row.finish_reason, "answer_tokens": len(row.tokens)}
        assert by_id[request.id]["generation"] == generation
        assert by_id[request.id].get("category") == request.category
    chats, read = read_chats(tmp_path / "out.jsonl", strict=True)
    assert len(chats) == report.written and not read.skipped


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_run_is_continued(tokenizer, sampler, tmp_path, temperature):
    settings = SETTINGS | {"temperature": temperature}
    options = AnswerOptions(6, batch_size=2, temperature=temperature, keep_unfinished=True)

    class Killed(Exception):
        pass

    def kill(report):
        if report.written >= 3:
            raise Killed

    whole, expected = run(tmp_path / "whole.jsonl", sampler, tokenizer, options=options, settings=settings)
    path = tmp_path / "out.jsonl"
    with pytest.raises(Killed):
        run(path, sampler, tokenizer, options=options, settings=settings, progress=kill)
    written = path.read_bytes()
    path.write_bytes(written + b'{"id": "r6", "messages": [{"role": "us')  # killed while writing a line
    report, lines = run(path, sampler, tokenizer, options=options, settings=settings)
    assert path.read_bytes().startswith(written) and report.resumed >= 3
    assert report.resumed + report.written == whole.written == len(lines)
    key = lambda line: line["id"]  # noqa: E731
    assert sorted(lines, key=key) == sorted(expected, key=key)
    again, _ = run(path, sampler, tokenizer, options=options, settings=settings)
    assert (again.resumed, again.written, again.tokens) == (7, 0, 0)


class Scripted:
    """Answers "re: <last turn>", too long if that holds "long", nothing if it holds "silent"; remembers the prompts."""

    def __init__(self, tokenizer, max_position=200):
        self.tokenizer, self.asked = tokenizer, []
        self.config = tiny.target_config(vocab_size=VOCAB, max_position=max_position)

    def sample(self, prompts, *, temperature, seeds, max_new_tokens, eos_token_ids=None, batch_size=None):
        from eagle_jax.results import GenerateResult, RowResult

        rows = []
        for prompt in prompts:
            text = self.tokenizer.decode(prompt)
            self.asked.append(text)
            turn = text.rsplit("<|im_start|>user\n", 1)[1].partition("<|im_end|>")[0]
            tokens = [] if "silent" in turn else self.tokenizer.encode(f"re: {turn}")
            unfinished = "long" in turn
            tokens = tokens if unfinished else [*tokens, 2]
            rows.append(RowResult(tokens, "length" if unfinished else "stop", 1, [], []))
        assert len(prompts) == len(seeds) and len(set(seeds)) == len(seeds)
        return GenerateResult(rows, 0.5)


def test_later_turns_follow_finished_answers(tokenizer, tmp_path):
    requests = [
        Request("two", None, "be kind", ("a", "b")),
        Request("cut", None, None, ("a", "long", "c")),
        Request("long", None, None, ("long",)),
        Request("silent", None, None, ("silent", "b")),
        Request("large", None, None, ("x" * 300,)),
    ]
    scripted = Scripted(tokenizer)
    options = AnswerOptions(6, batch_size=5)
    report, lines = run(tmp_path / "out.jsonl", scripted, tokenizer, requests, options)
    chats = {line["id"]: [(m["role"], m["content"]) for m in line["messages"]] for line in lines}
    assert chats == {
        "two": [("system", "be kind"), ("user", "a"), ("assistant", "re: a"), ("user", "b"), ("assistant", "re: b")],
        "cut": [("user", "a"), ("assistant", "re: a")],
    }
    assert report.left_out == {"length": 1, "empty answer": 1, "prompt too long": 1}
    assert "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nre: a<|im_end|>\n<|im_start|>user\nb" in "".join(
        scripted.asked
    )
    asked = len(scripted.asked)
    report, _ = run(tmp_path / "out.jsonl", scripted, tokenizer, requests, options)
    assert (report.resumed, report.written, len(scripted.asked)) == (5, 0, asked), "nothing is tried again"
    _, kept = run(tmp_path / "kept.jsonl", scripted, tokenizer, requests, AnswerOptions(6, keep_unfinished=True))
    assert {line["id"]: line["generation"]["finish_reason"] for line in kept} == {
        "two": "stop", "cut": "length", "long": "length"
    }  # fmt: skip


def test_files_that_cannot_be_continued(tokenizer, sampler, tmp_path):
    path = tmp_path / "out.jsonl"
    run(path, sampler, tokenizer, REQUESTS[:2])
    with pytest.raises(InputError, match=r"out\.jsonl:1: was generated with temperature 0\.0, this run has 1\.0; name"):
        ChatOutput(path, SETTINGS | {"temperature": 1.0})
    for text, message in (
        ("{\n", "out.jsonl:1: not valid JSON"),
        ("[]\n", "is not a generated chat"),
        ('{"id": 1, "messages": []}\n', "is not a generated chat"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            ChatOutput(path, SETTINGS)
        assert path.read_text() == text
    with pytest.raises(InputError, match=r"absent.*cannot be written"):
        ChatOutput(tmp_path / "absent" / "out.jsonl", SETTINGS)


def test_a_template_that_refuses_names_the_request(tokenizer, sampler, tmp_path):
    original, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('no') }}"
    try:
        with pytest.raises(InputError, match="request 'r0': the chat template refuses this conversation: no"):
            run(tmp_path / "out.jsonl", sampler, tokenizer)
    finally:
        tokenizer.chat_template = original


def test_requests_of_prompts_and_of_chats(tmp_path):
    prompts, chats = tmp_path / "prompts.jsonl", tmp_path / "chats.jsonl"
    prompts.write_text('{"id": "a", "category": "x", "turns": ["one", "two"]}\n{"id": "b", "turns": ["three"]}\n')
    requests, _ = read_requests(prompts)
    assert requests == [Request("a", "x", None, ("one", "two")), Request("b", None, None, ("three",))]
    assert len(read_requests(prompts, limit=1)[0]) == 1
    said = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"))]
    chats.write_text(f"{json.dumps({'id': 1, 'messages': said})}\n{{\n{json.dumps({'id': 1, 'messages': said[1:]})}\n")
    requests, report = read_requests(chats)
    assert requests == [Request("1", None, "s", ("u", "v")), Request("1#2", None, None, ("u", "v"))]
    assert report.skipped == 1 and "chats.jsonl:2" in report.messages[0]
    with pytest.raises(InputError, match=r"chats\.jsonl:2: not valid JSON"):
        read_requests(chats, strict=True)
    with pytest.raises(InputError, match="cannot read"):
        read_requests(tmp_path / "absent.jsonl")


def test_shards_and_seeds():
    parts = [shard_of(REQUESTS, i, 3) for i in range(3)]
    assert sorted(r.id for part in parts for r in part) == [r.id for r in REQUESTS]
    for index in (-1, 3):
        with pytest.raises(InputError, match="shard"):
            shard_of(REQUESTS, index, 3)
    seeds = {row_seed(seed, name, turn) for seed in range(3) for name in "abc" for turn in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**32 for seed in seeds)
