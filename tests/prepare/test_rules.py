"""Rules at their boundaries, against plain definitions, and switched off."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import ConfigError
from ropewalk.config.read import parse
from ropewalk.prepare.config import C4, Filter, FineWeb, Gopher, Language, RefinedWeb, Repetition, Urls, WordList
from ropewalk.prepare.lines import correct
from ropewalk.prepare.rules import Verdicts, judge, rules
from ropewalk.prepare.statistics import MEANINGS, measure
from tests.prepare import slow_rules as slow

OFF = {
    "min_characters": 0,
    "max_characters": 0,
    "max_mean_line_length": 0.0,
    "min_letter_share": 0.0,
    "max_duplicate_line_share": 1.0,
}
ALL = Filter(gopher=Gopher(), repetition=Repetition(), c4=C4(), fineweb=FineWeb(), refinedweb=RefinedWeb())
SENTENCES = (
    *(
        "The rope of hemp is long.",
        "They have to be with that walk!",
        "Is it the end?",
        "and so on",
        "a b c d",
        "1 2 3 4",
    ),
    *(
        "绳索是用麻做的，很长。",
        "你好！",
        "เชือกยาว",
        "# # #",
        "- item",
        "the end...",
        "We use cookies.",
        "{ x }",
        "HOME",
        "...",
        "== =",
    ),
)
texts = st.lists(
    st.tuples(st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=12), st.sampled_from((" ", "\n", "\n\n"))),
    max_size=6,
).map(lambda parts: "".join(glue.join(some) + glue for some, glue in parts))


def verdicts(drawn: list[str], chosen: Filter) -> Verdicts:
    found = correct(pa.array(drawn, pa.large_string()), chosen)
    stop_words = chosen.gopher.stop_words if chosen.gopher else ()
    measured = measure(found.text, stop_words=stop_words)
    columns = [*measured.columns, *found.columns.columns]
    return judge(pa.record_batch(columns, names=[*measured.schema.names, *found.columns.schema.names]), chosen)


def broken(drawn: list[str], chosen: Filter) -> list[list[str]]:
    found = verdicts(drawn, chosen)
    return [[rule.name for rule, gone in zip(found.rules, column, strict=True) if gone] for column in found.broken.T]


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    """Any choice of tables, any thresholds."""
    share, count = st.sampled_from((0.0, 0.05, 0.1, 0.2, 0.34, 0.5, 0.8, 1.0)), st.integers(0, 30)

    def drawn(cls: type) -> object:
        changed: dict[str, object] = {}
        for field in dataclasses.fields(cls):
            if isinstance(field.default, bool):
                changed[field.name] = draw(st.booleans())
            elif isinstance(field.default, float):
                changed[field.name] = draw(
                    share if field.name.endswith("share") else st.sampled_from((0.0, 0.2, 3.0, 5.0))
                )
            elif isinstance(field.default, int):
                changed[field.name] = draw(count)
        return cls(**changed)

    tables = {"gopher": Gopher, "repetition": Repetition, "c4": C4, "fineweb": FineWeb, "refinedweb": RefinedWeb}
    chosen = {name: drawn(cls) for name, cls in tables.items() if draw(st.booleans())}
    return dataclasses.replace(drawn(Filter), **chosen)


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), filters())
def test_every_decision_equals_the_plain_one(drawn, chosen) -> None:
    plain = []
    for text in drawn:
        text, share = slow.corrected(text, chosen)
        plain.append(slow.broken(text, chosen, flagged_share=share))
    assert [sorted(names) for names in broken(drawn, chosen)] == [sorted(names) for names in plain]


@pytest.mark.parametrize(
    ("rule", "threshold", "at", "beyond", "value"),
    [
        ("min_characters", 3, "绳é\n", "绳é", 2),
        ("max_characters", 2, "绳é", "绳ab", 3),
        ("max_mean_line_length", 3.0, "éé\naaaa\n", "éé\naaaa\naaaa", 10 / 3),
        ("min_letter_share", 0.5, "é 1 绳 2", "a 1 2", 1 / 3),
        ("max_duplicate_line_share", 0.5, "a\n\n\na\nb\nb\n", "a\na\na", 2 / 3),
        ("gopher.min_words", 2, "one two", "one", 1),
        ("gopher.max_mean_word_length", 2.0, "abc a", "abc ab", 2.5),
        ("gopher.min_stop_words", 2, "the rope of hemp", "the the rope", 1),
        ("gopher.min_alphabetic_share", 0.5, "a -", "a - 1", 1 / 3),
        ("repetition.max_top_2_gram_share", 0.5, "a b ccc", "a b a b", 6 / 7),
        ("repetition.max_duplicate_5_gram_share", 0.25, "a b c d e f", "a b c d e a b c d e", 5 / 19),
        ("c4.min_sentences", 2, "One. Two.", "One, two.", 1),
        ("fineweb.max_line_ends_per_word", 0.5, "a b\nc d\n", "a\n", 1),
        ("fineweb.min_terminal_line_share", 0.5, "a.\nb", "a\nb\nc.", 1 / 3),
    ],
)
def test_a_document_at_the_threshold_stays_and_one_beyond_it_goes(rule, threshold, at, beyond, value) -> None:
    lines_off = {"terminal_punctuation": False, "min_line_words": 0}
    off = {
        "gopher": Gopher(**{name: _neutral(name) for name in _thresholds(Gopher)}),
        "repetition": Repetition(**dict.fromkeys(_thresholds(Repetition), 1.0)),
        "c4": C4(**lines_off, lorem_ipsum=False, curly_brackets=False, min_sentences=0),
        "fineweb": FineWeb(**{name: _neutral(name) for name in _thresholds(FineWeb)}),
    }
    table, _, field = rule.rpartition(".")
    changed = dataclasses.replace(off[table], **{field: threshold}) if table else None
    chosen = Filter(**OFF, **{table: changed}) if table else Filter(**{**OFF, field: threshold})
    found = verdicts([at, beyond], chosen)
    assert [one.name for one in found.rules] == [rule]
    assert found.kept.tolist() == [True, False]
    assert found.removals().to_pylist()[1] == {"rule": rule, "value": pytest.approx(value), "threshold": threshold}
    assert found.removals().to_pylist()[0] == {"rule": None, "value": None, "threshold": None}


def _thresholds(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.name.startswith(("min_", "max_"))]


def _neutral(name: str) -> float:
    return 1.0 if name.startswith("max_") and name.endswith(("_share", "_ratio")) else 0


def test_simple_rules_are_asked_when_the_recipe_names_none_but_those_of_long_documents_and_lines() -> None:
    off = {"max_characters", "max_mean_line_length"}
    assert [rule.name for rule in rules(Filter())] == [name for name in OFF if name not in off]
    assert [rule.name for rule in rules(Filter(max_characters=10, max_mean_line_length=100.0))] == list(OFF)
    assert rules(Filter(**OFF)) == ()


def test_a_book_whose_chapters_are_lines_is_kept() -> None:
    chapter = "The ropewalk was a quarter of a mile long, and the strands were laid in it. " * 200
    assert verdicts([f"{chapter}\n{chapter[::-1]}\n"], Filter()).kept.tolist() == [True]


def test_without_rules_everything_stays() -> None:
    found = verdicts(["", "x"], Filter(**OFF))
    assert found.kept.tolist() == [True, True]
    assert found.removals()["rule"].to_pylist() == [None, None]


def test_the_first_rule_broken_is_the_one_recorded_and_the_others_are_known() -> None:
    found = verdicts(["1\n1\n1\n1\n1\n1\n"], Filter(min_characters=50))
    assert found.removals()["rule"].to_pylist() == ["min_characters"]
    assert [rule.name for rule, gone in zip(found.rules, found.broken[:, 0], strict=True) if gone] == [
        "min_characters",
        "min_letter_share",
        "max_duplicate_line_share",
    ]


def test_every_rule_of_every_table_names_a_setting_and_compares_a_column_that_is_measured() -> None:
    every = dataclasses.replace(
        ALL,
        max_characters=10**6,
        max_mean_line_length=100.0,
        language=Language(keep=("en",)),
        urls=Urls(domains=("a",), words=("a",), soft_words=("a",), parts=("a",)),
        words=WordList(files=("a",), max_share=0.5),
    )
    beside = {"language", "language_confidence", "original_words", "flagged_words", "listed_phrases", "listed_words"}
    beside |= {"url_domains", "url_words", "url_soft_words", "url_parts"}
    for rule in rules(every):
        value: object = every
        for key in rule.name.split("."):
            value = getattr(value, key)
        assert rule.column in {*MEANINGS, *beside}
        assert rule.over in {*MEANINGS, *beside, ""}
    assert len({rule.name for rule in rules(every)}) == len(rules(every)) == 44


def test_chinese_is_not_asked_for_long_words_or_english_stop_words() -> None:
    text = "绳索是用麻做的，很长。" * 20
    names = broken([text, "a b c d " * 50], Filter(**OFF, gopher=Gopher()))
    assert names[0] == []
    assert names[1] == ["gopher.min_mean_word_length", "gopher.min_stop_words"]


def test_a_language_is_kept_when_it_is_named_and_told_with_confidence() -> None:
    measured = pa.record_batch({"language": ["en", "en", "de", ""], "language_confidence": [0.9, 0.4, 0.9, 0.0]})
    named = judge(measured, Filter(**OFF, language=Language(keep=("en", "zh"))))
    assert named.kept.tolist() == [True, False, False, False]
    assert named.removals().to_pydict() == {
        "rule": [None, "language.min_confidence", "language.keep", "language.keep"],
        "value": [None, 0.4, None, None],
        "threshold": [None, 0.65, None, None],
    }
    anything = judge(measured, Filter(**OFF, language=Language(keep=("en",), min_confidence=0.0)))
    assert anything.kept.tolist() == [True, True, False, False]
    assert [rule.name for rule in anything.rules] == ["language.keep"]
    assert judge(measured, Filter(**OFF, language=Language())).kept.tolist() == [True, False, True, False]


def test_what_if_needs_only_columns() -> None:
    measured = measure(pa.array(["one two three", "one"], pa.large_string()))
    kept = [judge(measured, Filter(**OFF, gopher=Gopher(min_words=n, min_stop_words=0))).kept.sum() for n in (0, 2, 4)]
    assert kept == [2, 1, 0]
    assert judge(measured.slice(0, 0), Filter(gopher=Gopher())).kept.tolist() == []


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("min_characters = 10\nmax_characters = 5", "`min_characters`: 10 is above `max_characters` (5)"),
        ("[gopher]\nmin_words = 10\nmax_words = 5", "`gopher.min_words`: 10 is above `max_words` (5)"),
        ("[gopher]\nmin_stop_words = 2\nstop_words = ['的']", "`gopher.min_stop_words`: 2 is more than"),
        (
            "[language]\nkeep = ['en', 'English']",
            '`language.keep`: the model knows no language "English"; codes are such as en and zh',
        ),
        ("[language]\nkeep = ['zh-CN']", "near ones are zh"),
        ("[repetition]\nmax_top_2_gram_share = 2.0", "it must be at least 0 and at most 1"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_told_so(recipe, problem) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Filter, recipe, "x.toml")
    assert problem in str(caught.value)


def test_an_empty_table_switches_a_papers_rules_on() -> None:
    chosen = parse(Filter, "[gopher]\n[fineweb]\nmax_short_line_share = 0.5\n", "x.toml").value
    assert (chosen.gopher, chosen.fineweb, chosen.c4) == (Gopher(), FineWeb(max_short_line_share=0.5), None)
