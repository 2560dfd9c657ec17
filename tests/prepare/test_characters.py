"""Lengths are counted in characters, and the default rules keep short texts and long ones in any script."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ropewalk.prepare.chat import Turn, join_turns
from ropewalk.prepare.config import Deduplicate, Filter, Prepare, Source
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.rules import judge
from ropewalk.prepare.statistics import measure

KEPT = {
    "a Chinese quatrain": "白日依山盡，\n黃河入海流。\n欲窮千里目，\n更上一層樓。",
    "a couplet": "野火燒不盡，春風吹又生。",
    "a haiku": "an old silent pond\na frog jumps into the pond\nsplash! silence again\n",
    "a song with a refrain": "Row, row, row your boat\nRow, row, row your boat\nGently down the stream\n" * 2,
    "a message": "See you!",
    "a Chinese message": "好的，谢谢！",
    "a Hindi message": "नमस्ते, आप कैसे हैं?",
    "a Thai message": "ขอบคุณมากครับ",
    "a chat": join_turns([Turn("user", "hi"), Turn("assistant", "Hello!")]),
    "a Chinese chat": join_turns([Turn("user", "你好"), Turn("assistant", "好")]),
    "an answer in figures": "A: 12 apples and 7 pears",
    "a long book": "The strands were laid in the hall, and the hall was long. " * 60_000,
}


@pytest.mark.parametrize("name", KEPT)
def test_the_default_rules_keep(name: str) -> None:
    found = judge(measure(pa.array([KEPT[name]], pa.large_string())), Filter())
    assert found.removals()["rule"].to_pylist() == [None]


def test_the_default_rules_remove_what_is_no_text() -> None:
    columns = measure(pa.array(["1, 2, 3, 4\n" * 20, "same\n" * 20, "oh"], pa.large_string()))
    assert judge(columns, Filter()).kept.tolist() == [False, False, False]


def test_a_document_that_cuts_leave_too_short_is_measured_in_characters(settings: Prepare) -> None:
    shared = "The rope of hemp was laid in the long hall by the river. " * 3
    texts = {
        "0-first": shared,
        "1-chinese": f"{shared}\n\n绳索是用麻做的很长",
        "2-english": f"{shared}\n\n012345678901",
    }
    Path("short").mkdir()
    for name, text in texts.items():
        Path(f"short/{name}.txt").write_text(text, encoding="utf-8")
    made = dataclasses.replace(
        settings,
        sources=(settings.sources[0], Source(name="short", paths=("short",))),
        filter=Filter(min_characters=12, min_letter_share=0),
        deduplicate=Deduplicate(paragraphs=True),
    )
    rows = pq.read_table(prepare(made, seed=1).folder / "ledger.parquet").to_pylist()
    short = {row["id"].partition("-")[2]: row for row in rows if row["source"] == "short"}
    # 9 characters in 27 bytes, after two line ends; 12 characters in 12 bytes.
    gone = short["chinese.txt"]
    assert (gone["stage"], gone["rule"], gone["value"], gone["threshold"]) == ("paragraphs", "paragraphs", 9, 12)
    assert short["english.txt"]["outcome"] == "edited"
    assert short["english.txt"]["bytes"] == 12
