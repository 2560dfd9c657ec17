"""Scoring files: lines, options, second systems, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk.base.errors import ConfigError, DataError, UserError
from ropewalk.flow import score_annotations, score_files
from tests.evaluate.metrics.test_pyramid import PYRAMID, annotation, write_annotation, write_pyramid

sacre = pytest.importorskip("sacrebleu.metrics")

REFERENCE = ["A rope is laid.", "It has three strands.", "The walk is long."]
ONE = ["A rope was laid.", "It has three strands.", "The walk is very long."]
OTHER = ["A rope.", "Strands.", "Walk."]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, lines in (("ref", REFERENCE), ("one", ONE), ("other", OTHER)):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lines_are_scored_against_the_same_lines(files: Path) -> None:
    bleu, rouge = score_files(
        ["bleu", "rougeL"],
        predictions=Path("one.txt"),
        references=[Path("ref.txt"), Path("other.txt")],
        options=["bleu.tokenize=char", "bleu.lowercase=true", "rougeL.part=recall"],
    )
    theirs = sacre.BLEU(tokenize="char", lowercase=True)
    assert bleu.a.value == pytest.approx(theirs.corpus_score(ONE, [REFERENCE, OTHER]).score)
    assert bleu.a.signature == theirs.get_signature().format()
    assert (rouge.a.name, rouge.a.n, rouge.b, rouge.test) == ("rougeL_recall", 3, None, None)


def test_a_second_system_is_compared_by_a_paired_test(files: Path) -> None:
    where = {"predictions": Path("one.txt"), "references": [Path("ref.txt")], "predictions_b": Path("other.txt")}
    (found,) = score_files(["chrf"], **where)
    assert found.b is not None
    assert found.test is not None
    assert found.test.difference == pytest.approx(found.b.value - found.a.value)
    assert found.test.test == "approximate randomization"
    (again,) = score_files(["chrf"], **where, test="bootstrap", seed=3)
    assert again.test is not None
    assert again.test.test == "paired bootstrap"
    json.dumps(found.tree())


def test_texts_of_several_lines_are_json_strings(files: Path) -> None:
    Path("text.jsonl").write_text(json.dumps("A rope.\nA walk.\u2028") + "\n", encoding="utf-8")
    (found,) = score_files(["rougeLsum"], predictions=Path("text.jsonl"), references=[Path("text.jsonl")])
    assert (found.a.value, found.a.n) == (1, 1)
    Path("text.jsonl").write_text('"a"\n["b"]\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"text\.jsonl:2: a list; each line of a \.jsonl file is one JSON string"):
        score_files(["rougeLsum"], predictions=Path("text.jsonl"), references=[Path("text.jsonl")])


def test_a_pyramid_may_stand_for_references(files: Path) -> None:
    write_pyramid(PYRAMID, files / "rope.pyr")
    (found,) = score_files(["pyramid"], predictions=Path("one.txt"), pyramid=Path("rope.pyr"))
    assert found.a.value > 0


def test_annotated_summaries_are_scored_by_people_and_program(files: Path) -> None:
    for name, found in (("a.pan", annotation("1", "4", other=1)), ("b.pan", annotation())):
        write_annotation(found, files / name)
    scores, agreed = score_annotations([Path("a.pan"), Path("b.pan")], output=files / "automatic")
    assert [each.manual.weight for each in scores] == [4, 0]
    assert (agreed.pairs, agreed.recall) == (8, 0)
    again, _ = score_annotations([files / "automatic" / "a.pan"])
    assert again[0].manual == again[0].automatic == scores[0].automatic


def test_what_cannot_be_scored_is_refused(files: Path) -> None:
    def refused(metric: str = "chrf", *, option: str = "", **files: Path) -> str:
        given = {"predictions": Path("one.txt"), **files}
        references = [given.pop("reference", Path("ref.txt"))]
        with pytest.raises(UserError) as error:
            score_files([metric], references=references, options=[option] if option else (), **given)  # type: ignore[arg-type]
        return str(error.value)

    Path("short.txt").write_text("a\n")
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    assert "ref.txt: 3 lines for 1 predictions" in refused(predictions=Path("short.txt"))
    assert "short.txt: 1 lines for 3 questions" in refused(predictions_b=Path("short.txt"))
    assert "empty.txt: empty" in refused(predictions=Path("empty.txt"))
    assert "latin.txt: byte 3 is not UTF-8" in refused(predictions=Path("latin.txt"))
    assert "none.txt: No such file" in refused(predictions=Path("none.txt"))
    assert "write METRIC.OPTION=VALUE" in refused(option="lowercase=true")
    assert "`bleu` is not among the metrics: chrf" in refused(option="bleu.lowercase=true")
    assert "chrf: no option `order`; it has char_order, word_order" in refused(option="chrf.order=3")
    assert "chrf: cannot be made with beta='two'" in refused(option="chrf.beta=two")
    assert 'did you mean "chrf"' in refused("chrff")
    with pytest.raises(ConfigError):
        score_files(["belu"], predictions=Path("one.txt"), references=[Path("ref.txt")])
    with pytest.raises(UserError, match="name the references"):
        score_files(["bleu"], predictions=Path("one.txt"))
