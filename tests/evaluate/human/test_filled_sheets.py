"""What raters send back is read if it fits; otherwise file, line, value and remedy are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk.base.errors import DamagedFile, DataError, UserError
from ropewalk.flow import export_sheets, import_ratings, show_ratings

from .studies import by_system, fill, write_run


@pytest.fixture
def study(tmp_path: Path) -> Path:
    export_sheets([write_run(tmp_path / "run")], tmp_path / "study", items=8, raters=2, repeat=0.25)
    return tmp_path / "study"


def changed(path: Path, old: str, new: str, *, count: int = 1) -> Path:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, count), "utf-8")
    return path


def refusal(study: Path, *paths: Path) -> str:
    with pytest.raises(UserError) as caught:
        import_ratings(study, paths)
    assert not (study / "ratings.jsonl").exists()
    return str(caught.value)


def row_of(path: Path, number: int) -> str:
    """A line of the file; no text of these sheets spans lines."""
    return path.read_text("utf-8").splitlines()[number - 1]


def test_a_sheet_is_read_once_however_often_it_is_imported(study: Path) -> None:
    sheet = fill(study, "r1", by_system)
    first = import_ratings(study, [sheet])
    assert (first["added"], first["ratings"], first["expected"]) == (30, 30, 60)
    written = (study / "ratings.jsonl").read_bytes()
    again = import_ratings(study, [sheet, sheet])
    assert (again["added"], again["changed"]) == (0, 0)
    assert (study / "ratings.jsonl").read_bytes() == written


def test_a_corrected_sheet_replaces_its_ratings_and_appends(study: Path) -> None:
    sheet = fill(study, "r1", by_system)
    before = import_ratings(study, [sheet])
    fill(study, "r1", lambda *_: 3)
    after = import_ratings(study, [sheet])
    assert (after["added"], after["changed"]) == (0, 30)
    assert after["ratings"] == before["ratings"]
    assert {each["mean"] for each in after["questions"]["typical"]["systems"]} == {3}
    assert len((study / "ratings.jsonl").read_bytes().splitlines()) == 1 + 60


def test_blank_cells_and_absent_lines_are_counted_as_missing(study: Path) -> None:
    sheet = fill(study, "r1", lambda rater, question, item, line: "" if question == "fluent" else 2)
    sheet.write_text("\n".join(sheet.read_text("utf-8").splitlines()[:-1]) + "\n", "utf-8")
    (read,) = import_ratings(study, [sheet])["files"]
    assert (read["ratings"], read["missing"]) == (18, 12)


@pytest.mark.parametrize(
    ("value", "told"),
    [("6", 'typical is "6"'), ("0", 'typical is "0"'), ("2.5", 'typical is "2.5"'), ("good", 'typical is "good"')],
)
def test_a_score_outside_the_scale_names_file_line_value_and_remedy(study: Path, value: str, told: str) -> None:
    sheet = fill(study, "r1", lambda *_: 4)
    changed(sheet, row_of(sheet, 3), row_of(sheet, 3).replace(",4,4,4,", f",{value},4,4,"))
    message = refusal(study, sheet)
    assert f"{sheet}:3: {told}" in message
    assert "write a whole number from 1 to 5, or leave it blank" in message


def test_an_edited_id_a_double_line_and_another_sheet_are_told_together(study: Path, tmp_path: Path) -> None:
    sheet, other = fill(study, "r1", by_system), fill(study, "r2", by_system)
    identity = row_of(sheet, 2).split(",")[1]
    changed(sheet, identity, "r1-00000000")
    changed(other, row_of(other, 5), f"{row_of(other, 5)}\n{row_of(other, 5)}")
    export_sheets([tmp_path / "run"], tmp_path / "second", items=8, raters=1, seed=9)
    strange = fill(tmp_path / "second", "r1", by_system)
    message = refusal(study, sheet, other, strange)
    assert f'{sheet}:2: there is no item "r1-00000000"' in message
    assert f"{other}:6: item" in message
    assert "first in line 5" in message
    assert f'{strange}: sheet "' in message
    assert "is not of this export" in message


def test_two_files_that_contradict_each_other_are_refused(study: Path) -> None:
    sheet = fill(study, "r1", by_system)
    copy = study / "copy.csv"
    copy.write_bytes(sheet.read_bytes())
    fill(study, "r1", lambda *_: 3)
    assert "but " in refusal(study, sheet, copy)


def test_what_spreadsheets_make_of_a_table_is_read(study: Path) -> None:
    """Semicolons, a byte order mark, 4.0 for 4."""
    sheet = fill(study, "r1", lambda *_: "4.0")
    lines = [line.replace(",", ";") for line in sheet.read_text("utf-8").replace(", which", " which").splitlines()]
    sheet.write_text("\n".join(lines), "utf-8-sig")
    assert import_ratings(study, [sheet])["added"] == 30


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("sheet,id", "sheets,id", "column `sheet` is not there"),
        ("comment", "remarks", "column `remarks` is unknown"),
        ("fluent", "typical", "column `typical` is there twice"),
    ],
)
def test_a_changed_head_is_refused(study: Path, old: str, new: str, told: str) -> None:
    sheet = changed(fill(study, "r1", by_system), old, new)
    assert told in refusal(study, sheet)


def test_a_sheet_with_other_questions_or_no_line_is_told(study: Path, tmp_path: Path) -> None:
    export_sheets([tmp_path / "run"], tmp_path / "pairs", items=4, raters=1, mode="pairwise")
    pairs = fill(tmp_path / "pairs", "r1", lambda *_: "A")
    assert "is not of this export" in refusal(study, pairs)
    sheet = fill(study, "r1", by_system)
    head = row_of(sheet, 1)
    sheet.write_text(f"{head}\n", "utf-8")
    assert f"{sheet}: no line below the head" in refusal(study, sheet)
    sheet.write_text("", "utf-8")
    assert "column `sheet` is not there" in refusal(study, sheet)


def test_a_file_in_another_encoding_and_one_that_is_absent_are_refused(study: Path) -> None:
    sheet = fill(study, "r1", by_system)
    sheet.write_bytes(sheet.read_bytes() + "\nköln".encode("latin-1"))
    assert "not UTF-8; save it as `CSV UTF-8`" in refusal(study, sheet)
    assert "there is no such file" in refusal(study, study / "nothing.csv")


def test_the_json_of_the_page_is_read_like_its_csv(study: Path) -> None:
    key = json.loads((study / "key.json").read_text())
    rows = [{"id": line["id"], "scores": {"typical": 4}, "comment": "so so"} for line in key["sheets"]["r2"]]
    path = study / "filled.json"
    path.write_text(json.dumps({"format": 1, "sheet": f"{key['export']}-r2", "ratings": rows}))
    (read,) = import_ratings(study, [path])["files"]
    assert (read["ratings"], read["missing"]) == (10, 20)
    rows[0]["scores"] = {"typical": True}
    path.write_text(json.dumps({"sheet": f"{key['export']}-r2", "ratings": rows}))
    with pytest.raises(UserError, match=r'filled.json:1: typical is "True"'):
        import_ratings(study, [path])
    path.write_text('{"ratings": 3}')
    with pytest.raises(UserError, match="not a sheet saved by the page"):
        import_ratings(study, [path])


def test_a_damaged_rating_or_key_is_not_read(study: Path) -> None:
    sheet = fill(study, "r1", by_system)
    import_ratings(study, [sheet])
    log, key = study / "ratings.jsonl", study / "key.json"
    whole = log.read_bytes()
    log.write_bytes(whole.replace(b'"score": 1', b'"score": 5', 1))
    with pytest.raises(DamagedFile, match=r"ratings.jsonl: this file of ratings is damaged"):
        import_ratings(study, [sheet])
    log.write_bytes(whole)
    log.rename(study / "away.jsonl")
    with pytest.raises(DataError, match=r"human.json: not the results of ratings.jsonl beside it"):
        show_ratings(study)
    log.write_bytes(whole)
    kept = key.read_bytes()
    key.unlink()
    export_sheets([study.parent / "run"], study, items=8, raters=2, seed=4)
    with pytest.raises(DataError, match=r"key.json: not the key of the ratings in ratings.jsonl"):
        show_ratings(study)
    key.write_bytes(kept)
    assert show_ratings(study)["ratings"] == 30
    changed(key, '"human"', '"model"')
    with pytest.raises(DamagedFile, match="key of sheets is damaged"):
        import_ratings(study, [sheet])
