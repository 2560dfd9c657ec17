"""Line-wise corrections against plain definitions, and the account of what they took."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.prepare.config import C4, Filter, RefinedWeb
from ropewalk.prepare.lines import Corrected, correct
from tests.prepare import slow_lines as slow

PIECES = (
    *(
        "A rope is long.",
        "He said “go.”",
        "What?",
        "Yes!",
        "and so on",
        "the end...",
        "绳索很长。你好！",
        "首页",
        "12,345",
        "ไทย",
    ),
    *(
        "3 likes",
        "2 comments 5 shares",
        "HOME",
        "ABOUT US",
        "One",
        "Sign in",
        "read more",
        "Read more ...",
        "items in cart",
    ),
    *(
        "enable JavaScript now.",
        "We use cookies here.",
        "see our privacy policy.",
        "x" * 12,
        "x" * 13,
        "e.g. this",
        ")",
    ),
    *("[1]", "[]", "[edit]", "[citation needed]", "[12", "word[3].", "\u3000", "👍", "- item"),
)
GLUE = (" ", " ", " ", "\n", "\n", "\n\n", "\n \n\n", "", "\t\n")

texts = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(GLUE)), max_size=14).map(
    lambda parts: "".join(piece + glue for piece, glue in parts)
)


def corrected(drawn: list[str], chosen: Filter) -> Corrected:
    result = correct(pa.array(drawn, pa.large_string()), chosen)
    result.text.validate(full=True)
    return result


def switched(cls: type, draw: st.DrawFn) -> object:
    """Settings with some of the rules off."""
    changed = {}
    for field in dataclasses.fields(cls):
        if isinstance(field.default, bool):
            changed[field.name] = draw(st.booleans())
    return cls(**changed)


@st.composite
def c4_settings(draw: st.DrawFn) -> C4:
    some = switched(C4, draw)
    unit = draw(st.sampled_from(("line", "sentence", "paragraph")))
    return dataclasses.replace(
        some, unit=unit, max_word_length=draw(st.sampled_from((0, 12))), min_line_words=draw(st.integers(0, 4))
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), c4_settings())
def test_c4_drops_what_the_plain_definition_drops(drawn, chosen) -> None:
    assert corrected(drawn, Filter(c4=chosen)).text.to_pylist() == [slow.c4(text, chosen) for text in drawn]


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(0, 11), st.data())
def test_refinedweb_drops_and_flags_what_the_plain_definition_does(drawn, pattern_words, data) -> None:
    chosen = dataclasses.replace(switched(RefinedWeb, data.draw), pattern_words=pattern_words)
    result = corrected(drawn, Filter(refinedweb=chosen))
    columns = result.columns.to_pydict()
    found = zip(result.text.to_pylist(), columns["original_words"], columns["flagged_words"], strict=True)
    assert list(found) == [slow.refinedweb(text, chosen) for text in drawn]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(texts, st.text(max_size=40)), min_size=1, max_size=4), c4_settings())
def test_bytes_before_are_bytes_after_and_those_that_rules_took(drawn, chosen) -> None:
    result = corrected(drawn, Filter(refinedweb=RefinedWeb(), c4=chosen))
    before = [len(text.encode()) for text in drawn]
    after = [len(text.encode()) for text in result.text.to_pylist()]
    assert (after + result.removed_bytes.sum(axis=0)).tolist() == before
    assert ((result.units > 0) == (result.removed_bytes > 0)).all()


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("refinedweb.max_uppercase_share", "HOME ABOUT us"),
        ("refinedweb.numbers", "12 345 - 6.7"),
        ("refinedweb.counters", "3 likes · 2 comments"),
        ("refinedweb.single_words", "Home"),
        ("refinedweb.patterns", "Read more..."),
        ("c4.max_word_length", "A word of " + "x" * 1001 + " is too long."),
        ("c4.terminal_punctuation", "A line that just stops"),
        ("c4.terminal_punctuation", "A line that trails off..."),
        ("c4.min_line_words", "Two words."),
        ("c4.javascript", "Please enable Javascript in your browser."),
        ("c4.policy", "By going on you accept our terms of use."),
    ],
)
def test_each_rule_is_named_for_what_it_dropped(rule, line) -> None:
    text = f"A sentence that stays.\n{line}\nAnother one that stays.\n"
    result = corrected([text], Filter(refinedweb=RefinedWeb(), c4=C4()))
    assert result.text.to_pylist() == ["A sentence that stays.\nAnother one that stays.\n"]
    assert {name for name, taken in zip(result.rules, result.units[:, 0], strict=True) if taken} == {rule}


def test_phrases_and_citations_are_cut_out_of_lines_that_stay() -> None:
    text = "Sign in | Our news today: a rope.\nA long rope of hemp.[1] Made here.[citation needed]\n"
    result = corrected([text], Filter(refinedweb=RefinedWeb(), c4=C4()))
    assert result.text.to_pylist() == ["Our news today: a rope.\nA long rope of hemp. Made here.\n"]
    assert dict(zip(result.rules, result.units[:, 0].tolist(), strict=True))["c4.citations"] == 2


def test_chinese_lines_stay_where_english_ones_do() -> None:
    text = "绳索是用麻做的，很长。\n他说：“走吧。”\n首页 新闻\n"
    assert corrected([text], Filter(c4=C4())).text.to_pylist() == ["绳索是用麻做的，很长。\n他说：“走吧。”\n"]


def test_without_line_rules_the_text_is_the_same_column() -> None:
    column = pa.array(["a", "b"], pa.large_string())
    assert correct(column, Filter()).text is column


def test_a_phrase_of_too_many_words_is_refused() -> None:
    with pytest.raises(UserError, match="has 9 words"):
        corrected(["x"], Filter(refinedweb=RefinedWeb(ends=("1 2 3 4 5 6 7 8 9",))))
