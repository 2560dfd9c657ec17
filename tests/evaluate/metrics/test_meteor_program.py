"""METEOR 1.5 with files of the Java program's formats, against scores of the program with the same files."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.evaluate.metrics.meteor_program import MeteorProgram
from ropewalk.evaluate.metrics.resampling import measured

from .texts import answered, corpus_value

pytest.importorskip("nltk")
FUNCTIONS = "the a is of"
SYNSETS = {"rope": "1 2", "cord": "1", "lane": "3", "walk": "3 4", "man": "5", "stroll": "4"}
PARAPHRASES = [
    ("in the end", "finally"),
    ("a lot of", "many"),
    ("many", "numerous"),
    ("laid out", "spread"),
    ("long rope", "cable"),
    ("kept dry", "not wet"),
]
SCORES = [
    ("the men laid out a long rope in the end", "finally the man spread the cable", 0.26569015005797053),
    ("a lot of cords is numerous", "many ropes is a lot of rope", 0.28893002300306264),
    (
        "he strolled the lane of the rope walk , the walk of the rope",
        "the rope walk of the lane , a stroll of the rope , he walked",
        0.41504830759377925,
    ),
    ("many men strolled", "a lot of men walked", 0.7688787185354692),
    ("the rope is kept dry", "the rope is kept dry", 1.0),
    ("the the the rope rope walk walk the rope", "rope the walk the rope the walk rope the the", 0.41102442932646244),
]
"""Of meteor-1.5.jar -l en with these files."""
CORPUS = 0.393088603062831


@pytest.fixture
def program(tmp_path: Path) -> Path:
    jar = tmp_path / "meteor-1.5.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        archive.writestr("function/english.words", "\n".join(FUNCTIONS.split()))
        archive.writestr("synonym/english.synsets", "".join(f"{word}\n{ids}\n" for word, ids in SYNSETS.items()))
        archive.writestr("synonym/english.exceptions", "man\nmen\n")
    (tmp_path / "data").mkdir()
    with gzip.open(tmp_path / "data" / "paraphrase-en.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"0.5\n{phrase}\n{other}\n" for phrase, other in PARAPHRASES)
    return jar


def test_values_equal_those_of_the_program(program: Path) -> None:
    metric = MeteorProgram(program=str(program), tokenize="space")
    items = [answered(prediction, reference) for prediction, reference, _ in SCORES]
    assert [metric.score(item) for item in items] == pytest.approx([score for *_, score in SCORES], rel=1e-12)
    assert corpus_value(metric, items) == pytest.approx(CORPUS, rel=1e-12)
    (found,) = measured(metric, items)
    assert found.value == pytest.approx(CORPUS)
    assert found.signature == ("1.5|en|tok:space|case:lc|program:meteor-1.5.jar|paraphrases:paraphrase-en.gz|refs:best")


def test_missing_and_damaged_files_are_named(program: Path) -> None:
    with pytest.raises(UserError, match=r"name the program, as meteor_1\.5_jar\.program=FOLDER/meteor-1\.5\.jar"):
        MeteorProgram()
    table = program.parent / "data" / "paraphrase-en.gz"
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"paraphrase-en\.gz: paraphrases of METEOR"):
        MeteorProgram(program=str(program)).score(answered("a", "b"))
    table.unlink()
    with pytest.raises(DataError, match=r"paraphrase-en\.gz: missing; it comes with the program"):
        MeteorProgram(program=str(program))
    program.write_text("no archive")
    with pytest.raises(DataError, match=r"not the program of METEOR 1\.5"):
        MeteorProgram(program=str(program))
