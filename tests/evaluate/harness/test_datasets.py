"""Data sets are found through `datasets.toml`, in any format, and never fetched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ropewalk.base.errors import DataError
from ropewalk.evaluate.harness.datasets import DataSets
from ropewalk.evaluate.harness.table_files import read_rows
from tests.evaluate.harness.opened import opened, written

ROWS: list[dict[str, Any]] = [
    {"kind": "sum", "question": "1 + 1 =", "answer": 2, "more": None},
    {"kind": "product", "question": "3 · 3 =", "answer": 9, "more": 0.5},
]
TASK = """task: sums
dataset_path: us/arithmetic
dataset_name: sum
test_split: test
doc_to_text: question
doc_to_target: "{{answer}}"
"""


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def asked(folder: Path, entries: str, text: str = TASK) -> list[str]:
    (folder / "datasets.toml").write_text(entries, "utf-8")
    path = written(folder, "sums.yaml", text)
    return [question.prompt for question in opened(path, data=[folder / "datasets.toml"]).questions]


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz", "csv", "tsv", "parquet", "arrow"])
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    table = pa.Table.from_pylist(ROWS)
    match ending:
        case "jsonl":
            path.write_text(lines(ROWS), "utf-8")
        case "json":
            path.write_text(json.dumps(ROWS), "utf-8")
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines(ROWS).encode()))
        case "csv" | "tsv":
            text = "kind,question,answer,more\nsum,1 + 1 =,2,\nproduct,3 · 3 =,9,0.5\n"
            path.write_text(text.replace(",", "\t") if ending == "tsv" else text, "utf-8")
        case "parquet":
            pq.write_table(table, path)
        case "arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    assert read_rows([path])[0] == ROWS


def test_fields_that_some_rows_lack_are_none_as_in_arrow(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"b": [2]}\n')
    assert read_rows([tmp_path / "rows.jsonl"])[0] == [{"a": 1, "b": None}, {"a": None, "b": [2]}]


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n', r"rows\.jsonl:2: not JSON"),
        ("rows.jsonl", "[1]\n", r"rows\.jsonl:1: a row must be a JSON object"),
        ("rows.csv", "a,b\n1\n", r"rows\.csv: row 2 has 1 cells; the first has 2"),
        ("rows.jsonl.gz", "no gzip", r"damaged gzip file"),
        ("rows.parquet", "no parquet", r"cannot be read as Parquet"),
        ("rows.xlsx", "", r"its name must end with \.jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=what):
        read_rows([tmp_path / name])


def test_an_entry_for_the_config_comes_before_the_wildcard_and_the_bare_name(tmp_path: Path) -> None:
    for name in ("own", "any", "bare"):
        (tmp_path / f"{name}.jsonl").write_text(lines([{"question": name, "answer": 1}]))
    bare, wild = '["us/arithmetic"]\ntest = "bare.jsonl"\n', '["us/arithmetic:*"]\ntest = "any.jsonl"\n'
    assert asked(tmp_path, bare) == ["bare"]
    assert asked(tmp_path, bare + wild) == ["any"]
    assert asked(tmp_path, bare + wild + '["us/arithmetic:sum"]\ntest = "own.jsonl"\n') == ["own"]


def test_rows_of_a_config_can_be_cut_out_of_a_common_file(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text(lines(ROWS), "utf-8")
    entry = '["us/arithmetic:*"]\ntest = "all.jsonl"\nwhere = { kind = "{config}" }\n'
    assert asked(tmp_path, entry) == ["1 + 1 ="]
    assert asked(tmp_path, entry, TASK.replace("dataset_name: sum", "dataset_name: product")) == ["3 · 3 ="]


def test_columns_can_be_made_of_others(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text(lines(ROWS), "utf-8")
    entry = '["us/arithmetic"]\ntest = "all.jsonl"\ncolumns = { prompt = "{{kind}}: {{question}}", same = "kind" }\n'
    text = TASK.replace("doc_to_text: question", 'doc_to_text: "{{prompt}} {{same}}"')
    assert asked(tmp_path, entry, text)[0] == "sum: 1 + 1 = sum"


def test_a_folder_is_searched_for_the_splits_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "sum"
    folder.mkdir(parents=True)
    for name in ("test-00001-of-00002", "test-00000-of-00002", "train", "dev"):
        (folder / f"{name}.jsonl").write_text(lines([{"question": name, "answer": 1}]))
    entry = '["us/arithmetic:*"]\nfolder = "data/{config}"\n'
    assert asked(tmp_path, entry) == ["test-00000-of-00002", "test-00001-of-00002"]
    assert asked(tmp_path, entry, TASK.replace("test_split: test", "validation_split: validation")) == ["dev"]


def test_data_may_lie_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "sets").mkdir(parents=True)
    (tmp_path / "site" / "sets" / "__init__.py").write_text("raise RuntimeError('it need not be imported')\n")
    (tmp_path / "site" / "sets" / "all.jsonl").write_text(lines(ROWS), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert len(asked(tmp_path, '["us/arithmetic"]\npackage = "sets"\ntest = "all.jsonl"\n')) == 2
    with pytest.raises(DataError, match="there is no package `set_s`"):
        asked(tmp_path, '["us/arithmetic"]\npackage = "set_s"\ntest = "all.jsonl"\n')


def test_a_missing_data_set_comes_with_the_entry_to_write_and_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        asked(tmp_path, "")
    told = str(error.value)
    assert told.startswith(
        f"{tmp_path}/sums.yaml:2: task `sums`: the data set us/arithmetic (sum) is not on this machine"
    )
    assert 'hf download us/arithmetic --repo-type dataset --include "sum/*" --local-dir data/arithmetic' in told
    assert '["us/arithmetic:sum"]\n  test = "data/arithmetic/sum/test*.parquet"' in told


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ('test = "gone.jsonl"', r'\["us/arithmetic:sum"\]: test: no file gone\.jsonl in'),
        ('folder = "gone"', "has no data file"),
        ("where = { kind = 'sum' }", "names no file"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, entry: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        asked(tmp_path, f'["us/arithmetic:sum"]\n{entry}\n')


def test_toml_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "datasets.toml").write_text("[us\n")
    with pytest.raises(DataError, match=r"datasets\.toml: "):
        DataSets([tmp_path / "datasets.toml"]).find("us")


def test_the_validation_split_stands_in_for_a_test_split_that_is_not_here(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text(lines(ROWS), "utf-8")
    entry, text = '["us/arithmetic"]\nvalidation = "all.jsonl"\n', TASK + "validation_split: validation\n"
    assert len(asked(tmp_path, entry, text)) == 2
    with pytest.raises(DataError, match="reads split `test`, and there are validation"):
        asked(tmp_path, entry)
