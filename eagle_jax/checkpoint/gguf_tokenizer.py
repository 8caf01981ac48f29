"""The tokenizer and chat template inside a GGUF file (byte-level BPE, the kind the supported families use)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from eagle_jax.checkpoint.gguf import GgufSource
from eagle_jax.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# Token types of the format that are matched whole in a text, and whether decoding may skip them.
_ADDED = {2: True, 3: True, 4: False}

# How text is cut into words before merging, as in the tokenizer files these models were published with.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclasses.dataclass(frozen=True)
class _Style:
    """split: a regular expression, or None for GPT-2's; digits: every digit is a word of its own; whole_words: a word
    that is a token is not merged from pieces; nfc: text is normalised first; bos: texts start with the bos token
    unless the file says otherwise."""

    split: str | None = None
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False


_STYLES = {
    "default": _Style(),
    "gpt-2": _Style(),
    "smollm": _Style(digits=True),
    "llama-bpe": _Style(split=_LLAMA3, whole_words=True, bos=True),
    "qwen2": _Style(split=_QWEN2, nfc=True),
}


def read_tokenizer(source: GgufSource) -> PreTrainedTokenizerFast:
    """The tokenizer, with its special tokens and chat template.

    Raises:
      CheckpointError: another kind of tokenizer, or lists that contradict each other.
    """
    from transformers import PreTrainedTokenizerFast

    reader = _Reader(source)
    kind = reader.take("ggml.model", str)
    if kind != "gpt2":
        raise reader.fail("ggml.model", f"{kind!r} is not supported (gpt2, which is byte-level BPE)")
    name = reader.take("ggml.pre", str, "default")
    if name not in _STYLES:
        raise reader.fail("ggml.pre", f"{name!r} is not supported ({', '.join(_STYLES)})")
    tokens = reader.take("ggml.tokens", list)
    if len(set(tokens)) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise reader.fail("ggml.tokens", "must be strings, each of them once")
    special = {
        role: reader.token(key, tokens)
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer = _build(reader, _STYLES[name], tokens)
    _surround(reader, tokenizer, _STYLES[name], special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=reader.take("chat_template", str, None),
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": token for role, token in special.items() if token is not None},
    )


def _build(reader: _Reader, style: _Style, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, merge in enumerate(reader.take("ggml.merges", list)):
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        # The library would raise, or end the process, on a merge that its vocabulary cannot express.
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise reader.fail("ggml.merges", f"entry {i} ({merge!r}) does not join two tokens into a third")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=style.whole_words))
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if style.digits else []
    if style.split is not None:
        steps.append(pre_tokenizers.Split(Regex(style.split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()

    kinds = reader.take("ggml.token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise reader.fail("ggml.token_type", f"{len(kinds)} entries for {len(tokens)} tokens")
    for special in (True, False):
        added = [t for t, kind in zip(tokens, kinds, strict=True) if t and _ADDED.get(kind) is special]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in added])
    return tokenizer


def _surround(reader: _Reader, tokenizer: Tokenizer, style: _Style, special: dict[str, str | None]) -> None:
    """Makes encoding add the tokens that start and end a text, where the file asks for them."""
    from tokenizers import processors

    around = []
    for role, default in (("bos", style.bos), ("eos", False)):
        wanted = reader.take(f"ggml.add_{role}_token", bool, default)
        if wanted and special[role] is None:
            raise reader.fail(f"ggml.add_{role}_token", f"asks for a token that ggml.{role}_token_id does not name")
        around.append([role] if wanted else [])
    if not any(around):
        return
    first, last = ([str(special[role]) for role in roles] for roles in around)
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=ids),
        ]
    )


class _Reader:
    """Metadata under `tokenizer.`, typed."""

    def __init__(self, source: GgufSource):
        self._metadata, self._where = source.metadata, source.where

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: tokenizer.{key}: {problem}")

    def take(self, key: str, kind: type, default: Any = ...) -> Any:
        value = self._metadata.get(f"tokenizer.{key}", default)
        if value is ...:
            raise self.fail(key, "missing")
        if value is not default and type(value) is not kind:
            raise self.fail(key, f"expected {kind.__name__}, found {type(value).__name__}")
        return value

    def token(self, key: str, tokens: list[str]) -> str | None:
        number = self.take(f"ggml.{key}_token_id", int, None)
        if number is not None and not 0 <= number < len(tokens):
            raise self.fail(f"ggml.{key}_token_id", f"{number} is outside the vocabulary of {len(tokens)}")
        return None if number is None else tokens[number]
