"""The story of one document."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.prepare import ledger
from ropewalk.prepare.config import LANGUAGES, Language, Prepare
from ropewalk.prepare.ledger import Story
from ropewalk.prepare.pipeline import prepare

Explain = Callable[[str], Story]


@pytest.fixture
def explain(settings: Prepare) -> Explain:
    """The story of a document of the prepared corpus."""
    packed = Path("lines.jsonl.gz").read_bytes()
    Path("torn.jsonl.gz").write_bytes(packed[: len(packed) * 2 // 3])
    folder = prepare(settings, seed=1).folder
    return functools.partial(ledger.explain, folder, sources=settings.sources)


def test_a_removed_document_names_rule_value_and_threshold(explain: Explain) -> None:
    story = explain("texts:texts/short.txt")
    assert (story.outcome, story.stage, story.rule) == ("removed", "filter", "min_characters")
    assert "removed in filter by rule min_characters: measured 6, the limit is 100" in str(story)
    assert story.shard is None


def test_a_duplicate_and_its_partner_know_each_other(explain: Explain) -> None:
    copy = explain("texts:texts/deep/copy.txt")
    assert (copy.rule, copy.partner, copy.split) == ("exact", "texts:texts/03.md", None)
    original = explain("texts:texts/03.md")
    assert original.duplicates == ("texts:texts/deep/copy.txt",)
    assert original.outcome == "kept"


def test_a_kept_document_says_where_its_tokens_lie(explain: Explain) -> None:
    story = explain("packed:lines.jsonl.gz:3")
    assert story.shard is not None
    assert story.shard.startswith(f"packed-{story.split}-")
    assert story.tokens
    assert f"{story.tokens} tokens in {story.shard}" in str(story)


def test_an_edited_document_names_the_edit(explain: Explain) -> None:
    story = explain("texts:texts/crlf.txt")
    ends = Path("texts/crlf.txt").read_bytes().count(b"\r\n")
    assert (story.outcome, story.edits) == ("edited", ({"rule": "newlines", "bytes": ends},))
    assert f"edited by rule newlines: {ends} bytes less" in str(story)


@pytest.mark.parametrize("wrong", ["texts:texts/3.md", "texts:03.md", "text:texts/03.md"])
def test_an_unknown_id_is_answered_with_near_ones(explain: Explain, wrong: str) -> None:
    with pytest.raises(DataError, match=r"did you mean .*texts:texts/03.md"):
        explain(wrong)


def test_a_folder_without_ledger_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run `ropewalk prepare` with its recipe"):
        ledger.explain(tmp_path, "x", sources=())


@pytest.mark.parametrize("wrong", ["packed:torn.jsonl.gz", "packed:torn.jsonl.gz:99"])
def test_of_a_file_that_was_cut_off_the_lost_rest_is_suggested_first(explain: Explain, wrong: str) -> None:
    with pytest.raises(DataError, match=r"did you mean packed:torn.jsonl.gz:rest"):
        explain(wrong)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("packed:torn.jsonl.gz:rest", "damaged or cut off: what comes after its document [1-5] is lost; get or pack"),
        ("texts:texts/latin.txt", "it is not UTF-8; convert it to UTF-8"),
        ("texts:texts/nul.txt", "NUL bytes, as UTF-16 and programs do; convert it to UTF-8"),
        ("lines:lines.jsonl:13", "it is not JSON; correct it"),
        ("lines:lines.jsonl:15", "no text under the key `text`; say with `text_key` of the source"),
    ],
)
def test_what_could_not_be_read_is_explained_with_the_remedy(explain: Explain, document: str, reason: str) -> None:
    story = explain(document)
    assert re.search(reason, story.reason)
    assert story.reason in str(story)


def test_a_rule_that_judges_a_text_needs_no_reason(explain: Explain) -> None:
    assert explain("texts:texts/short.txt").reason == ""


def test_a_document_in_another_language_is_told_its_language(settings: Prepare) -> None:
    Path("texts/zh.txt").write_text("制绳厂是一座很长的建筑，工人们在那里把麻纤维纺成绳索，供船只使用。" * 4)
    Path("texts/none.txt").write_text("123 456 789 000\n" * 20)
    language = Language(keep=tuple(LANGUAGES - {"zh"}), min_confidence=0.0)
    rules = dataclasses.replace(settings.filter, language=language, min_letter_share=0.0, max_duplicate_line_share=1.0)
    folder = prepare(dataclasses.replace(settings, filter=rules), seed=1).folder
    story, empty = (
        ledger.explain(folder, f"texts:texts/{name}.txt", sources=settings.sources) for name in ("zh", "none")
    )
    assert (story.rule, story.value, story.threshold, story.measured["language"]) == ("language.keep", None, None, "zh")
    assert re.search(r"by rule language.keep: its language is zh, with confidence (0\.[6-9]\d?|1)$", str(story))
    assert "by rule language.keep: it has no letters" in str(empty)
