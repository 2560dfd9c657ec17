"""Maps of layers over steps: every measured number has its cell, and a strange event harms nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ropewalk.monitor.report.layer_maps import LEVELS, MOST_COLUMNS, layers_section
from ropewalk.monitor.report.run_report import write_report
from ropewalk.monitor.run_text import status_lines
from ropewalk.monitor.run_view import read_run
from tests.monitor.test_report_page import Reader

NAMES = ["embedding", "blocks.0", "blocks.0.attention", "blocks.0.mlp", "norm", "head"]


def measured(step: int, **columns: Any) -> dict[str, Any]:
    usual = {figure: [1.0] * 6 for figure in ("gradient", "weight", "update", "update_ratio", "activation")}
    usual["activation"] = [1.0, 1.0, 0.5, 0.5, 1.0, None]
    return {"format": 1, "time": 1.0, "rank": 0, "kind": "layers", "step": step, "layers": NAMES, **usual, **columns}


def add(run: Path, *events: dict[str, Any]) -> None:
    with open(run / "events.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def maps(run: Path) -> list[str]:
    """The wide drawings."""
    return re.findall(r'<div class="wide">(.*?)</div>', str(layers_section(read_run(run))))


def cells(drawing: str) -> int:
    return drawing.count("M")


def test_a_run_without_measurements_has_no_section(run: Path) -> None:
    assert layers_section(read_run(run)) is None
    assert 'id="layers"' not in write_report(run).read_text("utf-8")


def test_every_number_has_a_cell_and_what_is_null_has_none(run: Path) -> None:
    add(run, *(measured(step, gradient=[None, 1, 1, 1, 1, 1]) for step in range(5, 51, 5)))
    drawings = maps(run)
    # Four layers and two parts, ten steps; the embedding has no gradient, the head no output.
    assert [cells(drawing) for drawing in drawings] == [3 * 10, 4 * 10, 3 * 10, 2 * 10]
    page = Reader(write_report(run).read_text("utf-8"))
    assert page.open == []
    assert {"embedding", "blocks.0", "blocks.0.attention", "step 5"} <= set(page.words)
    assert "blocks.0: 1 to 1, last 1" in page.words


def test_larger_numbers_are_darker_and_broken_ones_red(run: Path) -> None:
    add(run, measured(5, gradient=[1e-6, 1.0, 1.0, 1.0, 1e-3, "nan"]))
    shades = [float(shade) for shade in re.findall(r'fill-opacity="([\d.]+)"', maps(run)[0])]
    assert shades[0] == 1
    assert shades[1:] == pytest.approx([1 / LEVELS, (LEVELS / 2 + 1) / LEVELS, 1], abs=0.01)
    assert maps(run)[0].count('class="bar broken"') == 1
    assert "Red is not finite." in str(layers_section(read_run(run)))


def test_a_long_run_is_thinned_to_its_last_step(run: Path) -> None:
    add(run, *(measured(step) for step in range(1, 1001)))
    drawing = maps(run)[0]
    assert cells(drawing) <= 4 * MOST_COLUMNS
    assert ">1000</text>" in drawing
    assert len(write_report(run).read_text("utf-8")) < 300_000


def test_measurements_that_a_restore_undid_do_not_count(run: Path) -> None:
    restored = {"format": 1, "time": 1.0, "rank": 0, "kind": "restored", "step": 5, "path": "", "seconds": 0.1}
    add(run, measured(5), measured(10), measured(15), restored, measured(10))
    assert [record.step for record in read_run(run).layers] == [5, 10]


@pytest.mark.parametrize(
    "strange",
    [
        {"layers": None},
        {"layers": []},
        {"gradient": "many", "activation": None},
        {"gradient": ["x"] * 6, "update_ratio": [0.0] * 6},
        {"activation": [1.0]},
        {"layers": [1, 2, 3]},
    ],
    ids=str,
)
def test_a_strange_event_harms_nothing(run: Path, strange: dict[str, Any]) -> None:
    add(run, measured(5), measured(10, **strange))
    assert Reader(write_report(run).read_text("utf-8")).open == []


def test_the_console_repeats_the_warning(run: Path) -> None:
    message = "step 40: blocks.3: the gradient vanishes: 1e-09, the median of all is 0.01; look at the weights"
    add(run, {"format": 1, "time": 2e9, "rank": 0, "kind": "warning", "message": message})
    assert any(line.endswith(message) for line in status_lines(read_run(run)))
