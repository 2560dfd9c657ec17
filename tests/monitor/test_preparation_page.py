"""The page of prepared data: everything in its file is on it, and nothing in its file can do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.base.seal import sealed_json
from ropewalk.monitor.report.preparation import render, write_page
from tests.monitor.conftest import manifest


def tree(**changes: Any) -> dict[str, Any]:
    """What `prepare report` writes, small."""
    return {
        "format": 1,
        "manifest": {**manifest(), "warnings": ["source `a`: look at this"]},
        "overlap": {"rules": ["min_characters", "gopher.min_words"], "documents": [[20, 5], [5, 8]], "alone": [15, 3]},
        "samples": [
            {"stage": "filter", "rule": "min_characters", "id": "a:x.txt", "value": 7.0, "threshold": 200.0,
             "text": "tiny"},
            {"stage": "near", "rule": "minhash", "id": "a:y.txt", "partner": "a:z.txt", "value": 0.91,
             "threshold": 0.8, "jaccard": 0.91, "text": "a copy", "partner_text": "the original"},
        ],
        "repeats": {
            "bars": [
                {"least": 1, "most": 1, "documents": 90, "copies": 90, "bytes": 9000},
                {"least": 9, "most": 16, "documents": 2, "copies": 20, "bytes": 2000},
            ],
            "harmful_share": 0.18,
            "warning": "18% of the text repeats",
        },
        "fertility": [
            {"by": "source", "name": "a", "tokens": 5000, "bytes_per_token": 3.4567, "characters_per_token": 3.2,
             "tokens_per_word": None},
        ],
        "composition": {
            "domain": [{"name": "prose", "read_bytes": 11000, "kept_bytes": 9000}],
            "language": [{"name": "en", "kept_bytes": 8000}],
        },
        **changes,
    }  # fmt: skip


def test_everything_in_the_file_is_on_the_page() -> None:
    page = render(tree(), name="5f0c9a41")
    for part in (
        *("5f0c9a41", "look at this", "gopher.min_words", "a:x.txt", "7, limit 200", "tiny"),
        *("a copy", "stays: a:z.txt", "the original", "18% of the text repeats"),
        *("2 texts 9 to 16 times", "90 texts once"),
        *("3.46", "prose", "en", "Outcome of each document"),
    ):
        assert part in page, part


def test_a_cell_of_the_overlap_is_shaded_by_the_share_of_its_row() -> None:
    page = render(tree(), name="x")
    assert 'class="num share-1" title="25%">5<' in page  # 5 of 20
    assert 'class="num share-3" title="62%">5<' in page  # 5 of 8


HOSTILE = '</pre><script>alert("x")</script>'


def test_texts_of_samples_are_only_ever_text() -> None:
    samples = [{"stage": "s", "rule": "r", "id": HOSTILE, "text": HOSTILE, "partner": HOSTILE, "partner_text": HOSTILE}]
    page = render(tree(samples=samples), name=HOSTILE)
    assert "<script>alert" not in page
    assert page.count("&lt;/pre&gt;&lt;script&gt;") >= 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(["manifest", "overlap", "samples", "repeats", "fertility", "composition"]), JSON)
)
def test_whatever_the_file_holds_there_is_a_page(changes: dict[str, Any]) -> None:
    assert render(tree(**changes), name="x").startswith("<!DOCTYPE html>")


def test_the_page_lies_beside_its_file_and_a_newer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(tree()))
    assert write_page(tmp_path) == tmp_path / "report.html"
    (tmp_path / "report.json").write_bytes(sealed_json(dict(tree(format=3))))
    with pytest.raises(DataError, match="upgrade ropewalk"):
        write_page(tmp_path)
