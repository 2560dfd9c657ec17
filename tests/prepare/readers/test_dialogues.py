"""Dialogues in JSON lines, JSON lists and Parquet."""

from __future__ import annotations

import json

import pytest
from format_samples import MESSAGES, SHAREGPT, WORDS, jsonl, parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXPECTED = f"\x1euser\x1fQuestion?\x1eassistant\x1f{WORDS}".encode()


@pytest.mark.parametrize("row", [{"messages": MESSAGES}, {"conversations": SHAREGPT}, MESSAGES, {"turns": MESSAGES}])
def test_roles_and_turns_are_kept_in_every_container(read, row) -> None:
    settings = {"format": "chat", "text_key": "turns"}
    assert [record.data for record in read("x.jsonl", jsonl([row, row]), **settings)] == [EXPECTED] * 2
    assert [record.data for record in read("x.json", json.dumps([row, row]).encode(), **settings)] == [EXPECTED] * 2
    if isinstance(row, dict):
        assert [record.data for record in read("x.json", json.dumps(row).encode(), **settings)] == [EXPECTED]
        columns = {key: [value, value] for key, value in row.items()}
        assert [record.data for record in read("x.parquet", parquet(columns), **settings)] == [EXPECTED] * 2


def test_separators_in_a_content_become_spaces_and_a_system_prompt_comes_first(read) -> None:
    row = {"system": "Be\x1ekind", "conversations": [{"from": "gpt", "value": "a\x1fb"}]}
    (record,) = read("x.jsonl", jsonl([row]), format="chat")
    assert record.data == b"\x1esystem\x1fBe kind\x1eassistant\x1fa b"


@pytest.mark.parametrize("role", ["Assistant", "ASSISTANT", " GPT", "Model"])
def test_an_answer_is_known_however_its_role_is_written(read, role) -> None:
    row = {"messages": [{"role": "User", "content": "Question?"}, {"role": role, "content": WORDS}]}
    assert [record.data for record in read("x.jsonl", jsonl([row]), format="chat")] == [EXPECTED]


def test_a_content_in_pieces_is_joined_when_all_are_text(read) -> None:
    pieces = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    good, bad = read(
        "x.jsonl",
        jsonl([{"messages": [{"role": "gpt", "content": c}]} for c in (pieces, [{"type": "image"}, *pieces])]),
        format="chat",
    )
    assert good.data == b"\x1eassistant\x1fab"
    assert bad.fault == "turn_not_text"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": "text"}, "turns_not_objects"),
        ({"messages": []}, "turns_not_objects"),
        ({"messages": [1]}, "turns_not_objects"),
        ({"messages": [{"role": "user"}]}, "turn_not_text"),
        ({"messages": [{"role": None, "content": "a"}]}, "turn_not_text"),
        ({"messages": MESSAGES[:1]}, "no_answer"),
        ({"messages": [{"role": "helper", "content": "a"}]}, "no_answer"),
        ({"other": []}, "no_turns"),
        (5, "not_object"),
    ],
)
def test_what_is_no_dialogue_is_a_fault(read, row, fault) -> None:
    first, second = read("x.jsonl", jsonl([row, {"messages": MESSAGES}]), format="chat")
    assert (first.fault, second.data) == (fault, EXPECTED)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    contents=st.lists(st.text(max_size=40), min_size=1, max_size=6), block=st.integers(1, 50), space=st.integers(0, 9)
)
def test_a_list_is_read_alike_in_blocks_of_any_size(read, monkeypatch, contents, block, space) -> None:
    monkeypatch.setattr("ropewalk.prepare.readers.lines.BLOCK_BYTES", block)
    rows = [{"messages": [{"role": "gpt", "content": content}]} for content in contents]
    data = json.dumps(rows, indent=space, ensure_ascii=block % 2 == 0).encode("utf-8", "surrogatepass")
    found = [record.data.decode() for record in read("x.json", data, format="chat")]
    clean = [content.replace("\x1e", " ").replace("\x1f", " ") for content in contents]
    assert found == [f"\x1eassistant\x1f{content}" for content in clean]


@pytest.mark.parametrize(
    ("data", "documents", "fault"),
    [
        (b"[%s, %s, {broken", 2, "not_json"),
        (b"[%s, %s", 2, "not_json"),
        (b"[%s %s]", 1, "not_json"),
        (b"[%s, %s] more", 2, "not_json"),
        (b"[%s, %s, " + b"[" * 100_000, 2, "too_deep"),
        (b"[%s, %s, \xff]", 0, "not_utf8"),
        (b'[%s, %s, "' + b"x" * 3_000_000 + b'"]', 2, "too_large"),
    ],
)
def test_a_damaged_list_gives_the_dialogues_before_the_damage_and_one_fault(read, data, documents, fault) -> None:
    row = json.dumps({"messages": MESSAGES}).encode()
    head, middle, tail = data.split(b"%s")
    *before, rest = read("x.json", head + row + middle + row + tail, format="chat", document_bytes=1_000_000)
    assert [record.data for record in before] == [EXPECTED] * documents
    assert (rest.id, rest.fault) == ("s:x.json:rest", fault)


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "Add.\n\n1 and 2"),
        ({"instruction": "Sing.", "input": "", "output": "3", "text": "x"}, "Sing."),
        ({"instruction": "Read.", "context": "A book.", "response": "3"}, "Read.\n\nA book."),
        ({"question": "1 + 2?", "answer": "3"}, "1 + 2?"),
        ({"prompt": "1 + 2?", "completion": "3"}, "1 + 2?"),
    ],
)
def test_a_question_and_its_answer_are_a_dialogue_in_every_container(read, row, question) -> None:
    expected = [f"\x1euser\x1f{question}\x1eassistant\x1f3".encode()] * 2
    settings = {"format": "chat"}
    assert [record.data for record in read("x.jsonl", jsonl([row, row]), **settings)] == expected
    assert [record.data for record in read("x.json", json.dumps([row, row]).encode(), **settings)] == expected
    columns = {key: [value, value] for key, value in row.items()}
    assert [record.data for record in read("x.parquet", parquet(columns), **settings)] == expected


def test_an_answer_that_is_no_text_is_a_fault(read) -> None:
    (record,) = read("x.jsonl", jsonl([{"question": "Is it?", "answer": True}]), format="chat")
    assert record.fault == "turn_not_text"


@pytest.mark.parametrize("between", ["\n", "", ",\n"])
def test_a_json_file_of_records_is_read_as_jsonl_whatever_stands_between_them(read, between) -> None:
    rows = between.join(json.dumps({"body": words}) for words in ("one", "two"))
    data = f"[{rows}]" if "," in between else rows
    assert [r.data for r in read("x.json", data.encode(), format="jsonl", text_key="body")] == [b"one", b"two"]
