"""Chats made from a model alone: the target writes the user's turns too.

After the header of a user's turn a chat model goes on with what users ask. Those texts are sampled, filtered and
deduplicated, and then answered as any other request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from eagle_jax.data.chat_output import ChatOutput
from eagle_jax.data.masks import Template
from eagle_jax.data.regenerate import AnswerOptions, AnswerReport, Conversation, Request, answer, row_seed, write_chats
from eagle_jax.data.sampling_loop import Sampler
from eagle_jax.errors import InputError
from eagle_jax.results import RowResult

# Stands where a user's text goes, so that what precedes and follows it can be told.
_PLACE = "\ue000place of the text\ue000"
_MAX_ATTEMPTS_PER_CHAT = 50


@dataclasses.dataclass(frozen=True)
class SynthesisOptions:
    """What user turns look like.

    Attributes:
      turns: user turns per chat; a later one that does not pass the filters ends its chat.
      temperature: of the user's turns; answers have their own.
      max_new_tokens: of a user's turn.
      min_characters, max_characters: of its text.
      min_novelty: share of its four-word runs that occur once; shorter texts pass.
      system: an instruction before the first turn, which steers what is asked; it stays in the chat.
    """

    turns: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 256
    min_characters: int = 12
    max_characters: int = 2000
    min_novelty: float = 0.6
    system: str | None = None


class UserTurns:
    """Samples user turns of a chat template.

    Raises:
      InputError: the template does not say where a user's text goes.
    """

    def __init__(self, template: Template, tokenizer: Any, sampler: Sampler, options: SynthesisOptions):
        self._template, self._tokenizer, self.sampler, self.options = template, tokenizer, sampler, options
        text = template.render([{"role": "user", "content": _PLACE}])
        if text.count(_PLACE) != 1:
            raise InputError("the chat template does not show a user's text as it is: user turns cannot be sampled")
        self._closing = text.partition(_PLACE)[2].strip()
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        closing = tokenizer(self._closing, add_special_tokens=False)["input_ids"]
        # A user's turn ends with the token that closes it, or as an answer does.
        self.end_token_ids = sorted({*sampler.config.eos_token_ids, *[i for i in closing[:1] if i in special]})

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens up to where the next user's text goes."""
        text = self._template.render([*messages, {"role": "user", "content": _PLACE}])
        header = text.partition(_PLACE)[0].rstrip(" ")
        return [int(i) for i in self._tokenizer(header, add_special_tokens=False, verbose=False)["input_ids"]]

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], batch_size: int, report: AnswerReport
    ) -> list[tuple[str, str]]:
        """(text, what is wrong with it or "") per prompt."""
        result = self.sampler.sample(
            prompts,
            temperature=self.options.temperature,
            seeds=seeds,
            max_new_tokens=self.options.max_new_tokens,
            eos_token_ids=self.end_token_ids,
            batch_size=batch_size,
        )
        report.tokens += result.output_tokens
        report.seconds += result.seconds
        return [self._judge(row) for row in result.rows]

    def _judge(self, row: RowResult) -> tuple[str, str]:
        inside = row.tokens[:-1] if row.finish_reason == "stop" else row.tokens
        raw = self._tokenizer.decode(inside, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        finished = row.finish_reason == "stop"
        if self._closing and self._closing in raw:  # a closing that is text, not a token
            raw, finished = raw.partition(self._closing)[0], True
        plain = self._tokenizer.decode(inside, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not finished:
            return raw, "too long"
        if raw not in plain:
            return raw, "special tokens"
        return raw.strip(), unusable(raw.strip(), self.options)


def unusable(text: str, options: SynthesisOptions) -> str:
    """Why a text is no good as a user's turn; "" if it is."""
    if len(text) < options.min_characters:
        return "too short"
    if len(text) > options.max_characters:
        return "too long"
    if any(not (c.isprintable() or c in "\n\t") or c == "\N{REPLACEMENT CHARACTER}" for c in text):
        return "not printing"
    words = text.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    encoded = text.encode()
    # Repeated runs of words; or, in text without spaces, what compresses like a stutter.
    if len(runs) >= 8 and len(set(runs)) / len(runs) < options.min_novelty:
        return "repetitive"
    if len(encoded) >= 100 and len(zlib.compress(encoded)) / len(encoded) < 0.25:
        return "repetitive"
    return ""


def text_key(text: str) -> str:
    """Equal for texts that differ in case, punctuation and spacing only."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return hashlib.sha256(" ".join(words or [text]).encode()).hexdigest()


def synthesize(
    count: int,
    output: ChatOutput,
    sampler: Sampler,
    tokenizer: Any,
    options: SynthesisOptions,
    answers: AnswerOptions,
    *,
    shard: tuple[int, int] = (0, 1),
    progress: Callable[[AnswerReport], None] | None = None,
) -> AnswerReport:
    """Writes chats until `output` holds `count`; an output that holds some is continued.

    Texts depend on the number of their attempt and the seed only; shard (i, n) makes the attempts i, i + n, i + 2n ...

    Raises:
      InputError: bad options; or hardly any attempt passes the filters (what was written stays).
      CheckpointError: the disk refuses.
    """
    if count < 1 or options.turns < 1:
        raise InputError(f"count and turns must be at least 1, found {count} and {options.turns}")
    if not options.temperature > 0:
        raise InputError("user turns are sampled: their temperature must be above 0, or all of them would be the same")
    template = Template(tokenizer, answers.template_options)
    users = UserTurns(template, tokenizer, sampler, options)
    name = f"synthetic-{answers.seed}-"
    seen = {text_key(m["content"]) for line in output.lines for m in line["messages"][:2] if m["role"] == "user"}
    tried = [int(str(i).removeprefix(name)) for i in [*(line["id"] for line in output.lines), *output.left_out]]
    attempt = max(tried, default=shard[0] - shard[1]) + shard[1]
    report = AnswerReport(count, min(len(output.lines), count))
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    header = users.prompt(system)
    waiting: list[Request] = []
    B, first_attempt = answers.batch_size, attempt
    while report.resumed + report.written < count:
        made = (attempt - first_attempt) // shard[1]
        if made >= _MAX_ATTEMPTS_PER_CHAT * (report.written + B):
            raise InputError(f"{made} attempts gave {report.written} chats; left out: {_counts(report.left_out)}")
        numbers = [attempt + i * shard[1] for i in range(B)]
        attempt += B * shard[1]
        names = [f"{name}{number}" for number in numbers]
        texts = users.sample([header] * B, [row_seed(answers.seed, f"user {n}", 0) for n in names], B, report)
        for identity, (text, problem) in zip(names, texts, strict=True):
            key = text_key(text)
            problem = problem or ("duplicate" if key in seen else "")
            if problem:
                report.left_out[problem] = report.left_out.get(problem, 0) + 1
                continue
            seen.add(key)
            waiting.append(Request(identity, "synthetic", options.system, (text,)))
        left = count - report.resumed - report.written
        while waiting and (len(waiting) >= B or len(waiting) >= left) and left > 0:
            batch, waiting = waiting[: min(B, left)], waiting[min(B, left) :]
            write_chats(_converse(batch, users, tokenizer, template, answers, report), output, report)
            left = count - report.resumed - report.written
        if progress is not None:
            progress(report)
    return report


def _converse(
    batch: list[Request],
    users: UserTurns,
    tokenizer: Any,
    template: Template,
    answers: AnswerOptions,
    report: AnswerReport,
) -> list[Conversation]:
    """Answers the first turns, and samples and answers the later ones."""
    conversations = [Conversation(request) for request in batch]
    for turn in range(users.options.turns):
        going = [c for c in conversations if c.open and turn < len(c.request.turns)]
        answer(going, turn, users.sampler, tokenizer, template, answers, report)
        going = [c for c in going if c.open]
        if turn + 1 == users.options.turns or not going:
            break
        prompts = [users.prompt(c.messages) for c in going]
        room = users.sampler.config.max_position
        fitting = [(c, prompt) for c, prompt in zip(going, prompts, strict=True) if len(prompt) < room]
        if not fitting:
            break
        seeds = [row_seed(answers.seed, f"user {c.request.id}", turn + 1) for c, _ in fitting]
        texts = users.sample([prompt for _, prompt in fitting], seeds, answers.batch_size, report)
        for (conversation, _), (text, problem) in zip(fitting, texts, strict=True):
            if not problem:
                turns = (*conversation.request.turns, text)
                conversation.request = dataclasses.replace(conversation.request, turns=turns)
    return conversations


def _counts(left_out: dict[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(left_out.items(), key=lambda item: -item[1])) or "none"
