"""Bias by counts, against values published with HELM and examples worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.evaluate.metrics.bias import (
    Association,
    ChineseRaceRepresentation,
    GenderProfessions,
    GenderRepresentation,
    RaceAdjectives,
    RaceProfessions,
    RaceRepresentation,
    Representation,
    word_groups,
)
from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question


def value(metric: Representation, *texts: str) -> float | None:
    """The metric of a list of completions, each an item of its own."""
    items = [Item(question=Question(prompt=""), predictions=(text,)) for text in texts]
    found = measured(metric, items)
    return found[0].value if found else None


@pytest.mark.parametrize(
    ("metric", "texts", "wanted"),
    [
        # crfm-helm 0.5.16, test_bias_metrics.py: words and values.
        (RaceRepresentation(), [""], None),
        (RaceRepresentation(), ["Celine was happy to see her friends.", ""], None),
        (RaceRepresentation(), [" cHen was a student in their class"], 2 / 3),
        (RaceRepresentation(), ["castillo was a student"], 2 / 3),
        (RaceRepresentation(), ["chen and", "castillo were friends"], 1 / 3),
        (RaceRepresentation(), ["chen! and moore were friends"], 1 / 3),
        (RaceRepresentation(), ["chen, castillo and moore were friends"], 0),
        (GenderRepresentation(), ["wOman was happy"], 1 / 2),
        (GenderRepresentation(), ["Her daughter was happy"], 1 / 2),
        (GenderRepresentation(), ["Their daughters and sons were happy"], 0),
        (RaceAdjectives(), ["chen was a curious student"], 2 / 3),
        (RaceProfessions(), ["chen was a curious student", "castillo was a student"], 1 / 3),
        (GenderProfessions(), ["she was a curious student", "he was a student", "he was a student"], 1 / 6),
        # By hand: (3 of 4 and 1 of 4) is 1/4 away from halves; 1/4 and 1/2 have the mean 3/8.
        (GenderRepresentation(), ["She saw her and her friend, he did not."], 1 / 4),
        (GenderProfessions(), ["she she she he doctor", "he is a nurse"], (1 / 4 + 1 / 2) / 2),
        # Chinese: 他们 and 其他 hold 他 and are no man.
        (GenderRepresentation(), ["她是医生，他们和其他人都认识她的妈妈。", "他来了。"], 1 / 4),
        (GenderProfessions(), ["她是护士。", "他是医生，她也是医生。"], 1 / 4),
        (ChineseRaceRepresentation(), ["白人和黑人"], 1 / 2),
    ],
)
def test_values_are_those_of_helm_and_of_hand(metric: Representation, texts: list[str], wanted: float | None) -> None:
    found = value(metric, *texts)
    assert found == (wanted if wanted is None else pytest.approx(wanted, abs=1e-12))


def test_lists_of_unequal_size_are_weighted_as_in_helm(tmp_path: Path) -> None:
    """HELM has 20, 16 and 20 surnames: one of each is 2/39 away from thirds."""
    names = {"a": ["chen", *(f"a{n}" for n in range(19))], "b": ["castillo", *(f"b{n}" for n in range(15))]}
    names["c"] = ["moore", *(f"c{n}" for n in range(19))]
    (tmp_path / "names.tsv").write_text("".join(f"{group}\t{' '.join(words)}\n" for group, words in names.items()))

    class Names(Representation):
        name = "names"
        groups = (str(tmp_path / "names.tsv"),)

    assert value(Names(), "chen, castillo and moore were friends") == pytest.approx(2 / 39, abs=1e-12)
    assert Names().signature == "distance:tv|to:uniform|lists:names"


def test_every_builtin_list_has_groups_of_equal_size() -> None:
    metrics = [METRICS[name].load()() for name in METRICS if "representation" in name]
    assert len(metrics) == 3
    for metric in metrics:
        for name in metric.groups:
            assert len({*word_groups((name,)).sizes}) == 1, name


def test_repeats_of_an_item_are_counted_together_and_items_are_resampled() -> None:
    items = [Item(question=Question(prompt=""), predictions=("he", "she", "he")) for _ in range(20)]
    (found,) = measured(GenderRepresentation(), items)
    assert found.value == pytest.approx(2 / 3 - 1 / 2)
    assert found.interval == pytest.approx((found.value, found.value)), "every item is the same"
    mixed = [Item(question=Question(prompt=""), predictions=(word,)) for word in ["he", "she"] * 10]
    (found,) = measured(GenderRepresentation(), mixed)
    assert found.value == 0
    assert found.interval is not None
    assert found.interval[1] > 0.1


def test_a_missing_list_is_named_with_those_there_are() -> None:
    class Wrong(Association):
        name = "wrong"
        groups, targets = ("gender-fr",), ("professions-en",)

    with pytest.raises(DataError, match=r"gender-fr: No such file.*gender-en"):
        value(Wrong(), "text")
