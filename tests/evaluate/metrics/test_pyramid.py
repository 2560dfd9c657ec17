"""PYRAMID scores: by hand, by published numbers; DUCView's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.evaluate.metrics.pyramid import AutomaticPyramid, agreement, annotate, pyramid_score
from ropewalk.evaluate.metrics.pyramid_files import (
    Annotation,
    ContentUnit,
    Contributor,
    Pyramid,
    TextPart,
    read_annotation,
    read_pyramid,
    write_annotation,
    write_pyramid,
)
from ropewalk.evaluate.metrics.resampling import measured

from .texts import answered, reference_values

pytest.importorskip("nltk")


def said(text: str) -> Contributor:
    return Contributor(text, (TextPart(text, 0, len(text)),))


UNITS = (
    ContentUnit(
        "1", "Rope is made of three strands", tuple(map(said, ("three strands", "strands, three", "of 3 & more")))
    ),
    ContentUnit("2", "The walk is a quarter mile long", (said("the quarter mile of the walk"), said("a long walk"))),
    ContentUnit("3", "Hemp was imported", (said("hemp from abroad"), said("imported hemp"))),
    ContentUnit("4", "Tar keeps water out", (said("tar against water"),)),
)
PYRAMID = Pyramid(("Doc 1", "Rope ...", "Doc 2", "Doc 3", "a <b>"), UNITS, r"^Doc \d")


def annotation(*found: str, other: int = 0) -> Annotation:
    return Annotation(PYRAMID, ("A summary.",), {uid: (said("x"),) for uid in found}, (said("y"),) * other)


def test_scores_are_weights_over_the_largest_possible() -> None:
    assert (PYRAMID.references, PYRAMID.units_per_reference) == (3, 8 / 3)
    found = pyramid_score(annotation("1", "4", other=1))
    assert (found.weight, found.found, found.other) == (4, 2, 1)
    assert found.original == pytest.approx(4 / (3 + 2 + 2))  # three units: found and others
    assert found.modified == pytest.approx(4 / (3 + 2 + 2))  # a reference has 2.7 units
    assert pyramid_score(annotation("2", other=5)).original == pytest.approx(2 / 8)
    assert pyramid_score(annotation()).original == pyramid_score(annotation()).modified == 0


def test_files_hold_everything(tmp_path: Path) -> None:
    whole = Annotation(
        PYRAMID, ("Line & one.", "zwei “两”"), {unit.uid: () for unit in UNITS} | {"2": (said('a"b'),)}, ()
    )
    write_pyramid(PYRAMID, tmp_path / "rope.pyr")
    write_annotation(whole, tmp_path / "rope.pan")
    assert read_pyramid(tmp_path / "rope.pyr") == read_pyramid(tmp_path / "rope.pan") == PYRAMID
    assert read_annotation(tmp_path / "rope.pan") == whole


def test_files_of_ducview_with_their_dtd_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.pan").write_text(
        '<?xml version="1.0"?>\n<!DOCTYPE peerAnnotation [\n <!ELEMENT line (#PCDATA)>\n]>\n<peerAnnotation>'
        "<pyramid><startDocumentRegEx><![CDATA[D[0-9]]]></startDocumentRegEx><text><line>D1</line><line/></text>"
        '<scu uid="7" label="L"><contributor label="c"><part label="c" start="3" end="4"/></contributor></scu>'
        "</pyramid>"
        '<annotation><text><line>S</line></text><peerscu uid="7" label="(1) L"></peerscu>'
        '<peerscu uid="0" label="All non-matching SCUs go here"><contributor label="z"/></peerscu></annotation>'
        "</peerAnnotation>"
    )
    found = read_annotation(tmp_path / "a.pan")
    assert found.pyramid.units == (ContentUnit("7", "L", (Contributor("c", (TextPart("c", 3, 4),)),)),)
    assert (found.pyramid.text, found.pyramid.references, found.text) == (("D1", ""), 1, ("S",))
    assert (found.found, len(found.other)) == ({"7": ()}, 1)


BOMB = '<!DOCTYPE pyramid [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><pyramid><text><line>&b;</line></text></pyramid>'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "declares the entity `a`"),
        ('<!DOCTYPE p [<!ENTITY f SYSTEM "file:///etc/passwd">]><pyramid>&f;</pyramid>', "declares the entity `f`"),
        ("<pyramid>", "not XML"),
        ("<html/>", "a `html`; expected a `pyramid`"),
        ("<pyramid><text/></pyramid>", "no content units"),
        ('<pyramid><scu uid="1"/></pyramid>', "a `scu` has no `label`"),
        (
            '<pyramid><scu uid="1" label=""><contributor label=""><part label="" start="-1" end="x"/></contributor>'
            "</scu></pyramid>",
            "positions are whole numbers",
        ),
    ],
)
def test_what_is_no_pyramid_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.pyr").write_text(text)
    with pytest.raises(DataError, match=f"bad.pyr: .*{said}"):
        read_pyramid(tmp_path / "bad.pyr")
    with pytest.raises(DataError, match="No such file"):
        read_pyramid(tmp_path / "none.pyr")
    write_pyramid(PYRAMID, tmp_path / "rope.pyr")
    with pytest.raises(DataError, match="not a `peerAnnotation`"):
        read_annotation(tmp_path / "rope.pyr")


def test_units_are_found_by_their_words() -> None:
    summary = "Three strands are laid up. Nobody imported iron; the walk was long.\nTarred in 1.5 hours, 水。绳子。"
    found = annotate(PYRAMID, summary)
    texts = {uid: each.label for uid, (each,) in found.found.items()}
    assert texts == {"1": "Three strands are laid up.", "2": "the walk was long."}
    assert [each.label for each in found.other] == ["Nobody imported iron;", "Tarred in 1.5 hours, 水。", "绳子。"]
    for each in [*(one for (one,) in found.found.values()), *found.other]:
        assert summary[each.parts[0].start : each.parts[0].end] == each.label
    assert "3" in annotate(PYRAMID, summary, threshold=0.5).found
    assert annotate(PYRAMID, "").found == {}


def test_agreement_counts_pairs_of_summary_and_unit() -> None:
    found = agreement([(annotation("1", "2"), annotation("2", "3")), (annotation("4"), annotation("4"))])
    assert (found.precision, found.recall, found.f1, found.pairs) == (2 / 3, 2 / 3, 2 / 3, 8)
    assert found.kappa == pytest.approx((6 / 8 - 34 / 64) / (1 - 34 / 64))
    assert agreement([(annotation(), annotation())]).kappa == 1


def test_the_metric_scores_completions_by_the_file_of_their_document(tmp_path: Path) -> None:
    write_pyramid(PYRAMID, tmp_path / "rope.pyr")
    metric = AutomaticPyramid(folder=str(tmp_path))
    items = [answered("Hemp was imported. Three strands.", pyramid="rope.pyr"), answered("Iron.", pyramid="rope.pyr")]
    (found,) = measured(metric, items)
    assert (found.value, found.n, found.of) == (pytest.approx(5 / 7 / 2), 2, "summary")
    assert found.signature == "automatic|modified|stem overlap>=0.7|stem:porter|mean of items"
    assert AutomaticPyramid(score="original", folder=str(tmp_path)).score(items[0]) == 1
    with pytest.raises(UserError, match="has no field `pyramid`"):
        metric.score(answered("x"))


def test_sums_of_weights_of_human_annotations_are_reproduced() -> None:
    refs = reference_values("pyramid-numbers.json")
    units = tuple(ContentUnit(uid, uid, (said(uid),) * weight) for uid, weight in refs["weights"].items())
    pyramid = Pyramid((), units)
    assert pyramid.references == refs["n_references"]
    for target in refs["targets"].values():
        others = (said("z"),) * target["non_matching"]
        found = pyramid_score(Annotation(pyramid, (), {uid: (said("x"),) for uid in target["scus"]}, others))
        weights = sorted(refs["weights"].values(), reverse=True)
        assert found.weight == target["sum_weights"]
        assert found.original == pytest.approx(found.weight / sum(weights[: found.found + found.other]))
        assert found.modified == pytest.approx(found.weight / sum(weights[:27]))  # 134 units in 5 references
