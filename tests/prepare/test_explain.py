"""The story of one document."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.prepare.config import Prepare
from ropewalk.prepare.ledger import explain
from ropewalk.prepare.pipeline import prepare


@pytest.fixture
def folder(settings: Prepare) -> Path:
    return prepare(settings, seed=1).folder


def test_a_removed_document_names_rule_value_and_threshold(folder: Path) -> None:
    story = explain(folder, "texts:texts/short.txt")
    assert (story.outcome, story.stage, story.rule) == ("removed", "filter", "min_bytes")
    assert "removed in filter by rule min_bytes: measured 6, the limit is 100" in str(story)
    assert story.shard is None


def test_a_duplicate_and_its_partner_know_each_other(folder: Path) -> None:
    copy = explain(folder, "texts:texts/deep/copy.txt")
    assert (copy.rule, copy.partner, copy.split) == ("exact", "texts:texts/03.md", None)
    original = explain(folder, "texts:texts/03.md")
    assert original.duplicates == ("texts:texts/deep/copy.txt",)
    assert original.outcome == "kept"


def test_a_kept_document_says_where_its_tokens_lie(folder: Path) -> None:
    story = explain(folder, "packed:lines.jsonl.gz:3")
    assert story.shard is not None
    assert story.shard.startswith(f"packed-{story.split}-")
    assert story.tokens
    assert f"{story.tokens} tokens in {story.shard}" in str(story)


def test_an_edited_document_names_the_edit(folder: Path) -> None:
    story = explain(folder, "texts:texts/crlf.txt")
    ends = Path("texts/crlf.txt").read_bytes().count(b"\r\n")
    assert (story.outcome, story.edits) == ("edited", ({"rule": "newlines", "bytes": ends},))
    assert f"edited by rule newlines: {ends} bytes less" in str(story)


@pytest.mark.parametrize("wrong", ["texts:texts/3.md", "texts:03.md", "text:texts/03.md"])
def test_an_unknown_id_is_answered_with_near_ones(folder: Path, wrong: str) -> None:
    with pytest.raises(DataError, match=r"did you mean .*texts:texts/03.md"):
        explain(folder, wrong)


def test_a_folder_without_ledger_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run `ropewalk prepare` first"):
        explain(tmp_path, "x")
