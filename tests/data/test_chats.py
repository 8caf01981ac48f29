"""Files of chats: both forms, and every way a line can be unusable."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_jax.data.chats import Chat, read_chats
from eagle_jax.errors import InputError

USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
GOOD = {"id": "a", "messages": [USER, ANSWER]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chats.jsonl"


def write(path, *values):
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values), encoding="utf-8")


def test_both_forms_give_the_same_chat(path):
    sharegpt = {
        "id": 3,
        "category": "math",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "1 + 1?"},
            {"from": "gpt", "value": "2"},
            {"from": "user", "value": "And 日本語?"},
            {"from": "assistant", "value": "🦜"},
        ],
    }
    roles = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
    messages = [{"role": roles[m["from"]], "content": m["value"]} for m in sharegpt["conversations"]]
    write(path, sharegpt, {"messages": messages, "category": "math"})
    chats, report = read_chats(path)
    assert chats == [Chat("3", "math", tuple(messages)), Chat("line-2", "math", tuple(messages))]
    assert (report.chats, report.skipped, report.messages) == (2, 0, [])


def test_a_json_list_and_harmless_differences(path):
    path.write_text("\ufeff \n" + json.dumps([GOOD, {"messages": []}, GOOD], indent=1), encoding="utf-8")
    chats, report = read_chats(path)
    assert [chat.id for chat in chats] == ["a", "a"] and report.skipped == 1
    assert report.messages[0].startswith(f"{path}:item 2: no answer")
    path.write_text("\ufeff\r\n" + json.dumps(GOOD) + "\r\n\r\n", encoding="utf-8")
    assert len(read_chats(path, strict=True)[0]) == 1
    path.write_text('[{"messages":', encoding="utf-8")
    with pytest.raises(InputError, match=r"not valid JSON.*expected a JSON list of chats"):
        read_chats(path)


def test_parts_reasoning_and_empty_tool_calls(path):
    parts = {"role": "user", "content": [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1?"}]}
    thought = ANSWER | {"reasoning_content": "one and one", "tool_calls": []}
    write(path, {"messages": [parts, thought, USER]})
    (chat,), _ = read_chats(path, strict=True)
    assert chat.messages == (USER, ANSWER | {"reasoning_content": "one and one"}, USER)


def test_unfinished_answers_are_known(path):
    write(path, *(GOOD | {"generation": {"finish_reason": reason}} for reason in ("stop", "length")), GOOD)
    assert [chat.unfinished for chat in read_chats(path)[0]] == [False, True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "not an object: .*found list"),
        ('{"messages": [{"role": "user", "content": "\\ud83e"}]}', "half of a surrogate pair"),
        ({"turns": ["x"]}, "no messages: .*found .'turns'"),
        ({"messages": [USER, ANSWER], "conversations": [{}]}, "expected one of"),
        ({"messages": "x"}, "must be a list, found str"),
        ({"messages": []}, "no answer"),
        ({"messages": [USER]}, "no answer: .*among 1"),
        ({"messages": ["x", ANSWER]}, "message 0 is str"),
        ({"messages": [{"role": "tool", "content": "x"}, ANSWER]}, "unknown role: message 0 has 'tool'; known are sys"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "unknown role: message 0 has 'bing'; .*human"),
        ({"messages": [{"content": "x"}]}, "unknown role: message 0 has None"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, r"empty content: message 1 \(assistant\)"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty content: .*found None"),
        ({"messages": [USER, ANSWER | {"tool_calls": [1]}]}, "tool_calls, which are not supported"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}, ANSWER]}, "parts that are not text"),
        ({"messages": [ANSWER]}, "message 0 is of the assistant, expected the user"),
        ({"messages": [USER, ANSWER, ANSWER]}, "message 2 is of the assistant, expected the user"),
        ({"messages": [USER, USER, ANSWER]}, "message 1 is of the user, expected the assistant"),
        ({"messages": [USER, {"role": "system", "content": "x"}, ANSWER]}, "message 1 is of the system"),
    ],
)
def test_unusable_lines_are_skipped_counted_and_named(path, line, message):
    write(path, GOOD, "", line, GOOD)
    chats, report = read_chats(path)
    assert [chat.id for chat in chats] == ["a", "a"]
    assert report.skipped == 1 == sum(report.reasons.values())
    (found,) = report.messages
    assert found.startswith(f"{path}:3: ") and len(found) < 300 + len(str(path))
    with pytest.raises(InputError, match=rf"chats\.jsonl:3: .*{message}"):
        read_chats(path, strict=True)


def test_bytes_that_are_not_text(path):
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"id": "\xff"}\n')
    assert read_chats(path)[1].messages == [f"{path}:2: not UTF-8: byte 9 of the line"]


def test_only_the_first_problems_are_kept_all_are_counted(path):
    write(path, GOOD, *["{"] * 20, {"messages": [USER]})
    report = read_chats(path)[1]
    assert (report.skipped, len(report.messages)) == (21, 5)
    assert report.reasons == {"not valid JSON": 20, "no answer": 1}


def test_nothing_usable(path, tmp_path):
    for content in ("", "\n \n", "[]"):
        path.write_text(content)
        with pytest.raises(InputError, match=r"holds no usable chat; expected lines like \{\"messages\""):
            read_chats(path)
    path.write_text("{\n")
    with pytest.raises(InputError, match=r"the first problem of 1: .*chats\.jsonl:1: not valid JSON"):
        read_chats(path)
    with pytest.raises(InputError, match="cannot read: No such file"):
        read_chats(tmp_path / "absent.jsonl")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=100),
        st.recursive(st.none() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)).map(
            lambda value: json.dumps({"messages": [USER, {"role": "assistant", "content": value}]}).encode()
        ),
    )
)
def test_any_line_is_a_chat_or_skipped(path, line):
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line.replace(b"\n", b" ") + b"\n")
    chats, report = read_chats(path)
    assert len(chats) + report.skipped in (1, 2) and chats[0].id == "a"
