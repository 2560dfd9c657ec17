"""What the report shows, recounted from the ledger, the statistics and the texts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ropewalk.prepare import samples
from ropewalk.prepare.config import Deduplicate, Near, Prepare
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.rules import judge
from ropewalk.prepare.summary import write_summary
from ropewalk.store.shards import Shard, document_key
from tests.prepare.every_stage import every_stage, write_corpus

BEFORE_RULES = ("collect", "normalise", "correct")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    return every_stage(folder="prepared")


def summary(settings: Prepare) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """(folder, the report's object, rows of the ledger)."""
    folder = prepare(settings, seed=1).folder
    tree = json.loads(write_summary(folder, settings).read_text())
    return folder, tree, pq.read_table(folder / "ledger.parquet").to_pylist()


def test_overlap_counts_the_documents_that_break_two_rules(settings: Prepare) -> None:
    folder, tree, rows = summary(settings)
    verdicts = judge(pq.read_table(folder / "statistics.parquet").combine_chunks().to_batches()[0], settings.filter)
    broken = [
        {rule.name for rule, broken in zip(verdicts.rules, verdicts.broken[:, place], strict=True) if broken}
        for place, row in enumerate(rows)
        if row["stage"] not in BEFORE_RULES
    ]
    names = tree["overlap"]["rules"]
    assert set(names) == set().union(*broken)
    for (i, one), (j, two) in itertools.product(enumerate(names), repeat=2):
        assert tree["overlap"]["documents"][i][j] == sum({one, two} <= rules for rules in broken)
    assert tree["overlap"]["alone"] == [sum(rules == {name} for rules in broken) for name in names]


def test_composition_adds_up_to_the_ledger(settings: Prepare) -> None:
    _, tree, rows = summary(settings)
    for parts in tree["composition"].values():
        assert sum(part["read_documents"] for part in parts) == len(rows)
        assert sum(part["kept_bytes"] for part in parts) == sum(row["bytes"] for row in rows if row["split"])
    assert {part["name"] for part in tree["composition"]["source"]} == {"texts", "lines", "talk", "chapters", "novel"}


def test_without_a_rule_for_languages_a_sample_of_the_tokens_tells_them(settings: Prepare) -> None:
    plain = dataclasses.replace(settings, filter=dataclasses.replace(settings.filter, language=None))
    _, tree, rows = summary(plain)
    languages = tree["composition"]["language"]
    kept = sum(row["bytes"] for row in rows if row["split"])
    assert sum(part["kept_bytes"] for part in languages) == pytest.approx(kept, abs=len(languages))


def test_copies_count_towards_the_text_that_stays(settings: Prepare) -> None:
    folder, tree, rows = summary(settings)
    of = {row["id"]: row["partner"] or row["id"] for row in rows if row["stage"] not in BEFORE_RULES}
    groups: dict[str, int] = {}
    for name in of:
        groups[of[of[name]]] = groups.get(of[of[name]], 0) + 1
    bars = {bar["least"]: bar["documents"] for bar in tree["repeats"]["bars"] if bar["documents"]}
    assert bars == {times: sum(n == times for n in groups.values()) for times in sorted(set(groups.values()))}
    assert tree["repeats"]["warning"] == ""
    assert folder.exists()


def test_many_copies_raise_the_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    for number in range(40):
        (tmp_path / "texts" / f"again-{number}.txt").write_text((tmp_path / "texts" / "000.txt").read_text())
    _, tree, _ = summary(every_stage(folder="prepared"))
    assert "Hernandez" in tree["repeats"]["warning"]


def test_samples_are_a_few_of_each_rule_with_the_beginning_of_their_texts(settings: Prepare) -> None:
    uncut = dataclasses.replace(settings, deduplicate=Deduplicate(near=Near(threshold=0.7, max_removed_share=0.9)))
    folder, tree, rows = summary(uncut)
    removed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["rule"]:
            removed.setdefault((row["stage"], row["rule"]), []).append(row["id"])
    shown: dict[tuple[str, str], list[str]] = {}
    for sample in tree["samples"]:
        shown.setdefault((sample["stage"], sample["rule"]), []).append(sample["id"])
        if sample["id"].startswith("texts:") and sample["stage"] in ("deduplicate", "near"):
            for text, name in (("text", "id"), ("partner_text", "partner")):
                raw = Path(sample[name].removeprefix("texts:")).read_text("utf-8")
                assert raw.startswith(sample[text])
                assert len(sample[text]) == min(len(raw), samples.CHARACTERS)
    assert {key: len(ids) for key, ids in shown.items()} == {
        key: min(len(ids), samples.EACH) for key, ids in removed.items()
    }
    assert all(set(ids) <= set(removed[key]) for key, ids in shown.items())
    assert folder.exists()


def test_fertility_is_a_recount_of_tokens_and_texts(settings: Prepare) -> None:
    uncut = dataclasses.replace(settings, deduplicate=Deduplicate())
    folder, tree, rows = summary(uncut)
    measured = pq.read_table(folder / "statistics.parquet").to_pylist()
    tokens: dict[int, int] = {}
    for shard in (Shard(path) for path in folder.glob("*.tokens")):
        tokens |= {int(key): len(shard.document(place)) - 1 for place, key in enumerate(shard.ids)}
    for source in ("texts", "lines"):
        mine = [(row, m) for row, m in zip(rows, measured, strict=True) if row["source"] == source and row["split"]]
        spent = sum(tokens[document_key(row["id"])] for row, _ in mine)
        (found,) = [row for row in tree["fertility"] if (row["by"], row["name"]) == ("source", source)]
        assert (found["documents"], found["tokens"]) == (len(mine), spent)
        assert found["bytes_per_token"] == pytest.approx(sum(row["bytes"] for row, _ in mine) / spent, abs=1e-4)
        assert found["tokens_per_word"] == pytest.approx(spent / sum(m["words"] for _, m in mine), abs=1e-4)
    assert {row["by"] for row in tree["fertility"]} == {"source", "domain", "language"}
