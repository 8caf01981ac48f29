"""Chat prompts to tokens, and text from a stream of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_jax.errors import InputError, first_line

_HALF = "\N{REPLACEMENT CHARACTER}"


def encode_chat(
    tokenizer: Any, turns: str | Sequence[str] | Sequence[Mapping[str, str]], system: str | None = None
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    Args:
      tokenizer: a target's. Without a chat template the texts are encoded plainly, with a warning.
      turns: what the user says first; or user and assistant texts in turn; or messages {"role", "content"}.
      system: an instruction before the first message.

    Raises:
      InputError: nothing to say, a malformed message, or a template that refuses the conversation.
    """
    messages = _messages(turns)
    if system is not None:
        if messages[0]["role"] == "system":
            raise InputError("two system messages: one in the conversation, one given beside it")
        messages.insert(0, {"role": "system", "content": system})
    if not tokenizer.chat_template:
        warnings.warn(
            "the tokenizer has no chat template: the prompt is encoded as plain text, as a base model expects it",
            stacklevel=2,
        )
        return list(tokenizer.encode("\n".join(message["content"] for message in messages)))
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # templates raise jinja2 errors, and anything that they trigger
        raise InputError(f"the chat template refuses this conversation: {first_line(error)}") from error
    return [int(i) for i in ids]


def _messages(turns: str | Sequence[str] | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    listed: list[Any] = [turns] if isinstance(turns, str) else list(turns)
    if not listed:
        raise InputError("the conversation is empty")
    messages = []
    for i, turn in enumerate(listed):
        message = {"role": ("user", "assistant")[i % 2], "content": turn} if isinstance(turn, str) else turn
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise InputError(f"message {i} must be a text or have a role and a content that are texts, found {turn!r}")
        messages.append(dict(message))
    if messages[-1]["role"] == "user" and not messages[-1]["content"].strip():
        raise InputError("the prompt is empty")
    return messages


class StreamDecoder:
    """Turns tokens into text as they arrive, never emitting half of a character.

    The pieces concatenate to the tokenizer's own decoding of all tokens, special tokens skipped; what may be the start
    of a character waits for the tokens that complete it, or for `finish`.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Text of _ids[_start:_done] has been emitted; a tokenizer needs those as context (leading spaces).
        self._start = 0
        self._done = 0

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that is certain by now (maybe empty)."""
        self._ids.extend(int(i) for i in ids)
        before, after = self._decode(self._start, self._done), self._decode(self._start, len(self._ids))
        # A replacement character at the end may be the first bytes of a character still to come.
        if after.endswith(_HALF) or len(after) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """The rest, incomplete characters included."""
        before, after = self._decode(self._start, self._done), self._decode(self._start, len(self._ids))
        self._start = self._done = len(self._ids)
        return after[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        # Tidying spaces would change text that has been emitted already.
        return self._tokenizer.decode(
            self._ids[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
