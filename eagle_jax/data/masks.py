"""A chat as token ids, with the tokens that the assistant wrote marked.

A chat is rendered once by the tokenizer's template and tokenised once; the answers are spans of its characters, and the
mask marks the tokens inside. Templates say where answers lie in two ways: by generation markers (`{% generation %}`),
or by rendering each answer's prompt, which must be the beginning of the whole. Both give the same mask.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from eagle_jax.errors import InputError, first_line

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RESERVED = {"messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"}
_RESERVED |= {"continue_final_message", "return_assistant_tokens_mask"}


class MaskError(InputError):
    """A chat is rendered, but its answers cannot be told from the rest: the template, not the chat, needs a change."""


@dataclasses.dataclass(frozen=True)
class TokenizedChat:
    """tokens: [n] int32 ids; mask: [n] bool, whether token i belongs to an answer (its end token included)."""

    tokens: np.ndarray
    mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Span:
    """Where an answer lies among the characters of a rendered chat.

    start, stop: [start, stop).
    kind: "rendered" holds the answer and what closes its turn; "marked" is what the template says, maybe without the
      end token; "bounded" holds the answer, what closes it, and a user's turn.
    """

    start: int
    stop: int
    kind: Literal["rendered", "marked", "bounded"]


def encode_training_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    last_turn_only: bool = False,
    unfinished: bool = False,
    template_options: Mapping[str, Any] | None = None,
    end_token_ids: Collection[int] = (),
) -> TokenizedChat:
    """Tokens of a conversation, and which of them generation would have emitted.

    Those are the tokens of each answer up to the end token that closes it, and no other: no header, no white space
    behind the end token. A token that straddles the beginning of an answer is not among them. Messages after the last
    answer are left out.

    Args:
      tokenizer: a fast tokenizer with a chat template.
      messages: {"role", "content"} in turn, at least one of the assistant.
      last_turn_only: mark the last answer only.
      unfinished: the last answer was cut off: the token that closes it is the template's, and is not marked.
      template_options: the template's own switches, such as {"enable_thinking": False}.
      end_token_ids: ids that end an answer beside the tokenizer's end token (a target's).

    Raises:
      InputError: no template, or one that refuses this conversation.
      MaskError: the answers cannot be located, or nothing or everything is marked.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise InputError("the conversation has no answer to train on")
    kept = [dict(message) for message in messages[: answers[-1] + 1]]
    template = Template(tokenizer, template_options)
    text, spans = template.answers_by_markers(kept) if template.has_markers else template.answers(kept)
    if last_turn_only:
        if len(spans) != len(answers):
            raise MaskError(
                f"the chat template marks {len(spans)} stretches for {len(answers)} answers: cannot tell the last one"
            )
        spans = spans[-1:]

    tokens, offsets = _tokenize(tokenizer, text)
    ends = np.isin(tokens, [*end_token_ids, *_listed(tokenizer.eos_token_id)])
    special = np.isin(tokens, _special_ids(tokenizer))
    mask = np.zeros(tokens.shape, bool)
    for span in spans:
        first, last = np.searchsorted(offsets[:, 0], (span.start, span.stop))
        stop = _close(text, offsets, ends, special, span, int(first), int(last))
        if unfinished and span is spans[-1] and (ends[stop - 1] or special[stop - 1]):
            stop -= 1
        mask[first:stop] = True
    if not mask.any() or mask.all():
        raise MaskError(
            f"the chat template leads to a mask of {'all' if mask.any() else 'none'} of {mask.size} tokens: "
            "answers cannot be told from the rest"
        )
    return TokenizedChat(tokens, mask)


def _close(text: str, offsets: np.ndarray, ends: np.ndarray, special: np.ndarray, span: _Span, i: int, j: int) -> int:
    """Where the answer whose tokens are [i, j) really ends: after its end token, white space behind it left out."""
    found = np.flatnonzero(ends[i:j])
    if found.size:
        return i + int(found[0]) + 1
    if span.kind == "bounded":
        raise MaskError(
            "the chat template changes earlier answers when more turns follow, and closes them by no end token: "
            "cannot tell where they end"
        )
    if span.kind == "marked" and j < len(ends) and ends[j]:  # markers around the text only
        return j + 1
    closing = np.flatnonzero(special[i:j])
    if closing.size and not text[offsets[i + int(closing[-1]), 1] : span.stop].strip():
        return i + int(closing[-1]) + 1
    stop = span.start + len(text[span.start : span.stop].rstrip())
    return int(np.searchsorted(offsets[:, 0], stop))


class Template:
    """A tokenizer's chat template with its options fixed."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None):
        if not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template: chats cannot be turned into training data without one"
            )
        taken = sorted(_RESERVED & set(options or {}))
        if taken:
            raise InputError(f"template options {taken} are not the template's to choose")
        try:
            self.source = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(f"the tokenizer's chat templates: {first_line(error)}") from error
        self.has_markers = _MARKER.search(self.source) is not None
        self._options = {**tokenizer.special_tokens_map, **(options or {})}

    def _render(self, messages: list[dict[str, str]], **arguments: Any) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages], chat_template=self.source, **arguments, **self._options
            )
        except Exception as error:  # templates raise jinja2 errors, and anything that they trigger
            raise InputError(f"the chat template refuses this conversation: {first_line(error)}") from error
        return texts[0], spans[0] if spans else []

    def render(self, messages: list[dict[str, str]], *, prompt: bool = False) -> str:
        """The conversation as text, with the header of an answer to come when it is a `prompt`."""
        return self._render(messages, add_generation_prompt=prompt)[0]

    def answers_by_markers(self, messages: list[dict[str, str]]) -> tuple[str, list[_Span]]:
        """(text, answers) as the template marks them; marks with only white space between them are one answer."""
        text, marked = self._render(messages, return_assistant_tokens_mask=True)
        spans: list[_Span] = []
        for start, stop in marked:
            if spans and not text[spans[-1].stop : start].strip():
                spans[-1] = _Span(spans[-1].start, stop, "marked")
            elif start < stop:
                spans.append(_Span(start, stop, "marked"))
        return text, spans

    def answers(self, messages: list[dict[str, str]]) -> tuple[str, list[_Span]]:
        """(text, answers): each answer starts where its prompt ends, and its prompt must begin the text."""
        text = self.render(messages)
        spans: list[_Span] = []
        for i in reversed([i for i, message in enumerate(messages) if message["role"] == "assistant"]):
            prompt = self.render(messages[:i], prompt=True)
            if not text.startswith(prompt):
                raise MaskError(
                    f"the chat template renders the prompt of message {i} otherwise when its answer follows "
                    f"({_difference(prompt, text)}): its tokens would not be those of generation; train on each answer "
                    "as a chat of its own, or choose other template options"
                )
            if prompt == self.render(messages[:i]) and not _starts_with(text[len(prompt) :], messages[i]["content"]):
                raise MaskError(
                    f"the chat template ignores add_generation_prompt, and message {i} does not start where its prompt "
                    "ends: cannot tell the answer from its header"
                )
            closed = self.render(messages[: i + 1])
            if text.startswith(closed):
                spans.append(_Span(len(prompt), len(closed), "rendered"))
            else:  # the template shortens earlier answers; this one ends before the next answer's prompt does
                spans.append(_Span(len(prompt), spans[-1].start, "bounded"))
        return text, spans[::-1]


def _starts_with(text: str, content: str) -> bool:
    return text.lstrip().startswith(content.strip())


def _difference(expected: str, found: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    return f"at character {at}, {expected[at : at + 20]!r} became {found[at : at + 20]!r}"


def _tokenize(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n] int32, offsets [n, 2]): ids and the characters they stand for."""
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    except NotImplementedError as error:
        raise InputError(
            "the tokenizer does not say where its tokens lie in the text (it is not a fast one)"
        ) from error
    offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    return np.asarray(encoded["input_ids"], np.int32), offsets


@functools.lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> list[int]:
    return [*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)]


def _listed(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
