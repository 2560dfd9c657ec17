"""Each rule at its boundary, and the measures against plain definitions."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.prepare.config import Filter
from ropewalk.prepare.documents import TEXT_SCHEMA, Passed
from ropewalk.prepare.filters import filter_block, measure

OFF = {
    "min_bytes": 0,
    "max_bytes": 0,
    "max_mean_line_length": 0.0,
    "min_letter_share": 0.0,
    "max_duplicate_line_share": 1.0,
}


def passed(settings: Filter, *texts: str) -> Passed:
    ids = [str(number) for number in range(len(texts))]
    batch = pa.record_batch([ids, ids, ids, list(texts)], names=TEXT_SCHEMA.names).cast(TEXT_SCHEMA)
    return filter_block(settings)(batch)


@pytest.mark.parametrize(
    ("rule", "threshold", "at", "beyond", "value"),
    [
        ("min_bytes", 4, "éé", "éa", 3),
        ("max_bytes", 4, "éé", "ééa", 5),
        ("max_mean_line_length", 3.0, "éé\naaaa\n", "éé\naaaa\naaaa", 10 / 3),
        ("min_letter_share", 0.5, "é 1 绳 2", "a 1 2", 1 / 3),
        ("max_duplicate_line_share", 0.5, "a\n\n\na\nb\nb\n", "a\na\na", 2 / 3),
    ],
)
def test_a_document_at_the_threshold_stays_and_one_beyond_it_goes(rule, threshold, at, beyond, value) -> None:
    result = passed(Filter(**{**OFF, rule: threshold}), at, beyond)
    assert result.batch["text"].to_pylist() == [at]
    (row,) = result.removed
    assert (row.id, row.step, row.rule, row.threshold) == ("1", "filter", rule, threshold)
    assert row.value == pytest.approx(value)


@given(st.lists(st.text(), max_size=5))
def test_rules_that_are_switched_off_remove_nothing(texts) -> None:
    assert passed(Filter(**OFF), *texts).batch["text"].to_pylist() == texts


def test_the_first_rule_broken_is_the_one_recorded() -> None:
    assert [row.rule for row in passed(Filter(), "1\n1\n1\n1\n").removed] == ["min_bytes"]


@given(st.lists(st.text(alphabet="ab1é绳 \n\t", max_size=40), min_size=1, max_size=4))
def test_measures_agree_with_their_definitions(texts) -> None:
    measured = measure(texts)
    for row, text in enumerate(texts):
        lines = text.removesuffix("\n").split("\n") if text else []
        inked = [character for character in text if not character.isspace()]
        written = [line for line in text.split("\n") if line.strip()]
        repeated = sum(line in written[:place] for place, line in enumerate(written))
        assert measured["bytes"][row] == len(text.encode())
        assert measured["mean_line_length"][row] == (sum(map(len, lines)) / len(lines) if lines else 0)
        assert measured["letter_share"][row] == (sum(c.isalpha() for c in inked) / len(inked) if inked else 0)
        assert measured["duplicate_line_share"][row] == (repeated / len(written) if written else 0)
