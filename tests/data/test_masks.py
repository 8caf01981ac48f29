"""Which tokens of a chat are trained on: templates with and without markers, and those that leave no way to tell."""

from pathlib import Path

import numpy as np
import pytest
from cli_models import write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_jax.checkpoint.hub import BUILT_IN, cache_folder
from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.data.masks import encode_training_chat
from eagle_jax.errors import InputError

REAL = cache_folder() / "smollm2-135m" / Path(BUILT_IN["smollm2-135m"].member).name

TURN = "<|im_start|>{{ m['role'] }}\n"
CHATML = (
    "{% for m in messages %}" + TURN + "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}"
    "{%- generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same, with the end token outside of the marks, or with white space inside.
MARKED_TEXT = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
MARKED_MORE = MARKED.replace("{% endgeneration %}{{ '\n' }}", "\n{% endgeneration %}")
# Thoughts of earlier answers are left out, and without thinking the prompt ends with an empty thought, as Qwen3's does.
THINKING = (
    "{% for m in messages %}"
    + TURN
    + "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL = (
    "<|endoftext|>{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}<|im_end|>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
UNCLOSED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

U1, A1, U2, A2 = (
    {"role": role, "content": content}
    for role, content in (("user", "hi there"), ("assistant", "hello"), ("user", "bye"), ("assistant", "bye, 日本 🦜"))
)
SYSTEM = {"role": "system", "content": "be kind"}
CHAT = [SYSTEM, U1, A1, U2, A2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def encode(tokenizer, template, messages, **options):
    tokenizer.chat_template = template
    return encode_training_chat(tokenizer, messages, **options)


def marked(tokenizer, chat):
    """The stretches of marked tokens, as text."""
    assert chat.tokens.dtype == np.int32 and chat.mask.dtype == bool and chat.tokens.shape == chat.mask.shape
    edges = np.flatnonzero(np.diff(np.r_[0, chat.mask, 0]))
    return [tokenizer.decode(chat.tokens[i:j], skip_special_tokens=False) for i, j in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_TEXT, MARKED_MORE])
def test_answers_and_their_end_tokens(tokenizer, template):  # B89
    chat = encode(tokenizer, template, CHAT)
    assert marked(tokenizer, chat) == ["hello<|im_end|>", "bye, 日本 🦜<|im_end|>"]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    np.testing.assert_array_equal(chat.tokens, whole)  # tokenised once, as a whole
    np.testing.assert_array_equal(chat.mask, encode(tokenizer, CHATML, CHAT).mask)
    # What follows the prompt of the first answer is what the mask holds.
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(chat.tokens[: len(prompt)]) == prompt and chat.mask[: len(prompt) + 1].tolist() == [False] * len(
        prompt
    ) + [True]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_TEXT, THINKING])
def test_last_turn_only_in_every_path(tokenizer, template):  # B91
    chat = encode(tokenizer, template, CHAT, last_turn_only=True)
    whole = encode(tokenizer, template, CHAT)
    np.testing.assert_array_equal(chat.tokens, whole.tokens)
    assert marked(tokenizer, chat) == marked(tokenizer, whole)[1:]


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).map(
    lambda text: "x" + text
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_both_ways_give_the_same_arrays(tokenizer, turns, last_turn_only, system):  # B91
    messages = [SYSTEM] if system else []
    for user, assistant in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    by_prefix = encode(tokenizer, CHATML, messages, last_turn_only=last_turn_only)
    by_marks = encode(tokenizer, MARKED, messages, last_turn_only=last_turn_only)
    np.testing.assert_array_equal(by_prefix.tokens, by_marks.tokens)
    np.testing.assert_array_equal(by_prefix.mask, by_marks.mask)
    expected = [assistant + "<|im_end|>" for _, assistant in (turns[-1:] if last_turn_only else turns)]
    assert marked(tokenizer, by_prefix) == expected


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_TEXT, MISTRAL, UNCLOSED])
def test_what_closes_an_unfinished_answer_was_not_emitted(tokenizer, template):
    chat, finished = encode(tokenizer, template, CHAT, unfinished=True), encode(tokenizer, template, CHAT)
    np.testing.assert_array_equal(chat.tokens, finished.tokens)
    first, last = marked(tokenizer, finished)
    assert marked(tokenizer, chat) == [first, last.removesuffix("<|im_end|>")]


def test_messages_after_the_last_answer_are_left_out(tokenizer):
    chat, shorter = encode(tokenizer, CHATML, [U1, A1, U2]), encode(tokenizer, CHATML, [U1, A1])
    np.testing.assert_array_equal(chat.tokens, shorter.tokens)


def test_templates_without_a_header_or_an_end_token(tokenizer):
    assert marked(tokenizer, encode(tokenizer, MISTRAL, CHAT)) == [" hello<|im_end|>", " bye, 日本 🦜<|im_end|>"]
    assert marked(tokenizer, encode(tokenizer, UNCLOSED, CHAT)) == [" hello", " bye, 日本 🦜"]


def test_end_tokens_of_the_target_and_other_special_tokens_close_a_turn(tokenizer):
    for template, end, extra in (
        (CHATML.replace("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", ()),  # special, but not the tokenizer's end
        (CHATML.replace("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", (0,)),
        (MARKED_TEXT.replace("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", (0,)),
        (CHATML.replace("<|im_end|>", "#"), "#", (tokenizer.convert_tokens_to_ids("#"),)),
    ):
        assert marked(tokenizer, encode(tokenizer, template, [U1, A1], end_token_ids=extra)) == ["hello" + end]


def test_a_thinking_switch(tokenizer):
    """A prompt that the whole does not begin with would train on tokens that generation never meets."""
    empty = "<think>\n\n</think>\n\n"
    assert marked(tokenizer, encode(tokenizer, THINKING, CHAT)) == [
        "hello<|im_end|>",
        empty + "bye, 日本 🦜<|im_end|>",
    ]
    off = {"enable_thinking": False}
    one = encode(tokenizer, THINKING, [U1, A1], template_options=off)
    assert marked(tokenizer, one) == ["hello<|im_end|>"]
    with pytest.raises(
        InputError, match=r"renders the prompt of message 2 otherwise .*at character .*'<think>.*a chat of"
    ):
        encode(tokenizer, THINKING, CHAT, template_options=off)
    with pytest.raises(InputError, match=r"template options \['add_generation_prompt'\]"):
        encode(tokenizer, THINKING, CHAT, template_options={"add_generation_prompt": True})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only one turn') }}", "refuses this conversation: only one turn"),
        ("{% if %}", "refuses this conversation"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses this conversation"),
        # The header is rendered with the answer only.
        (CHATML.split("{% if")[0], "ignores add_generation_prompt, and message 4 does not start"),
        # Nothing but answers; no answer at all.
        (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}",
            "mask of all",
        ),
        (MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'bot'"), "mask of none of"),
        # Earlier answers change, and nothing closes them.
        (THINKING.replace("<|im_end|>", ""), "changes earlier answers .* cannot tell where they end"),
    ],
)
def test_templates_that_cannot_be_used(tokenizer, template, message):  # B89
    with pytest.raises(InputError, match=message) as error:
        encode(tokenizer, template, [U1, A1] if "mask of all" in message else CHAT)
    assert "\n" not in str(error.value)


def test_marks_that_leave_a_turn_out(tokenizer):
    template = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last")
    assert marked(tokenizer, encode(tokenizer, template, CHAT)) == ["bye, 日本 🦜<|im_end|>"]
    with pytest.raises(InputError, match="marks 1 stretches for 2 answers"):
        encode(tokenizer, template, CHAT, last_turn_only=True)
    with pytest.raises(InputError, match="no answer to train on"):
        encode(tokenizer, template, [U1])


@pytest.mark.skipif(not REAL.is_file(), reason="the built-in model has not been fetched")
def test_the_built_in_model():
    real = load_tokenizer(REAL)
    chat = encode_training_chat(real, [U1, A1, U2, A2])
    assert marked(real, chat) == ["hello<|im_end|>", "bye, 日本 🦜<|im_end|>"]
    text = real.decode(chat.tokens, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    expected = real.apply_chat_template([U1, A1, U2, A2], tokenize=True, return_dict=False)
    np.testing.assert_array_equal(chat.tokens, expected)
