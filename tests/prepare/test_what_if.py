"""What-if against a real run with the same thresholds."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ropewalk.base.errors import UserError
from ropewalk.prepare.config import Filter, FineWeb, Gopher, Language, Prepare, Repetition, Urls
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.what_if import what_if
from tests.prepare.every_stage import every_stage, write_corpus

DECIDED = ("collect", "normalise", "correct", "filter", "deduplicate")

GERMAN = """Eine Reeperbahn ist eine lange Bahn, auf der Seiler aus Fasern lange Taue drehen und schlagen.
Der Hanf kommt in Ballen an und wird mit Kämmen gereinigt, bevor ihn die Spinner zu Garn verdrehen.
Ein Schiff braucht viele Taue, und the ist kein deutsches Wort, das in diesem Text sonst noch steht.
"""


@pytest.fixture
def now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    Path("texts/german.txt").write_text(GERMAN)
    return every_stage(folder="prepared")


def with_filter(settings: Prepare, **changes: object) -> Prepare:
    return dataclasses.replace(settings, filter=dataclasses.replace(settings.filter, **changes))


def left(folder: Path) -> dict[str, str]:
    """The documents left after rules and equal documents, and their sources, by the ledger of a real run."""
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    return {row["id"]: row["source"] for row in rows if row["stage"] not in DECIDED}


def removed(folder: Path) -> dict[str, int]:
    """Documents by the rule that removed them, in the stages that what-if answers for."""
    found: dict[str, int] = {}
    for row in pq.read_table(folder / "ledger.parquet").to_pylist():
        if row["stage"] in ("filter", "deduplicate"):
            found[row["rule"]] = found.get(row["rule"], 0) + 1
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"min_characters": 500},
        {"min_characters": 0, "max_duplicate_line_share": 1.0},
        {"gopher": Gopher(min_words=90, min_stop_words=3)},
        {"gopher": None, "repetition": None, "language": None, "words": None},
        {"language": Language(keep=("en",), min_confidence=0.8)},
        {"repetition": Repetition(max_top_2_gram_share=0.05, max_duplicate_5_gram_share=0.01)},
        {"fineweb": FineWeb(max_short_line_share=0.1)},
        {"min_characters": 700, "max_characters": 900},
    ],
    ids=str,
)
def test_what_if_says_what_a_real_run_does(now: Prepare, changes: dict[str, object]) -> None:
    then = with_filter(now, **changes)
    folder = prepare(now, seed=1).folder
    shutil.rmtree("prepared/stages")  # no text is needed
    told = what_if(folder, now, then)
    real = prepare(then, seed=1).folder
    before, after = left(folder), left(real)
    assert (told.total.documents, told.total.documents_after) == (len(before), len(after))
    assert told.total.gained_documents == len(after.keys() - before.keys())
    assert told.total.lost_documents == len(before.keys() - after.keys())
    assert set(told.gained) <= after.keys() - before.keys()
    assert set(told.lost) <= before.keys() - after.keys()
    assert {rule: n for rule, (n, _) in told.rules.items() if n} == removed(folder)
    assert {rule: n for rule, (_, n) in told.rules.items() if n} == removed(real)
    for name, change in told.sources.items():
        assert change.documents_after == sum(source == name for source in after.values())
    manifest = prepare(then, seed=1).manifest
    decided = [next(step for step in source.steps if step.step == "deduplicate") for source in manifest.sources]
    assert told.total.bytes_after == sum(step.bytes_out for step in decided)
    assert told.total.bytes + told.total.gained_bytes - told.total.lost_bytes == told.total.bytes_after


def test_the_same_settings_change_nothing_and_later_stages_are_named(now: Prepare) -> None:
    told = what_if(prepare(now, seed=1).folder, now, now)
    assert (told.total.gained_documents, told.total.lost_documents) == (0, 0)
    assert told.later == {"near": 4}
    assert "later stages remove now: near 4" in str(told)


def test_documents_in_other_languages_are_lost_to_the_rule_that_says_so(now: Prepare) -> None:
    then = with_filter(now, language=Language(keep=("en",), min_confidence=0.01))
    told = what_if(prepare(now, seed=1).folder, now, then)
    assert (told.lost, told.lost_to) == (("texts:texts/german.txt",), {"language.keep": 1})


def test_settings_that_were_not_measured_are_refused(now: Prepare) -> None:
    folder = prepare(now, seed=1).folder
    lists = {"urls": Urls(domains=("words.txt",))}
    for changes in ({"gopher": Gopher(stop_words=("der", "die"))}, {"c4": None}, lists):
        with pytest.raises(UserError, match="change what is measured"):
            what_if(folder, now, with_filter(now, **changes))


def test_a_table_of_rules_that_the_recipe_has_not_can_be_tried(settings: Prepare) -> None:
    folder = prepare(settings, seed=1).folder
    tried = dataclasses.replace(settings, filter=Filter(min_characters=100, gopher=Gopher(min_words=1000)))
    assert what_if(folder, settings, tried).lost_to["gopher.min_words"] > 0
