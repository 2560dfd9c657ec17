"""The drawing of a pipeline schedule: a box where and as long as each computation is, and words that are only words."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from ropewalk.monitor.schedule_drawing import WIDEST, Drawing, Lane, ScheduleBox, schedule_svg, write_drawing

SVG = "{http://www.w3.org/2000/svg}"


def drawing(*lanes: list[ScheduleBox], stages: int | None = None, title: str = "a title") -> Drawing:
    return Drawing(
        title=title,
        caption="a caption",
        unit="seconds",
        stages=[f"stage {number}" for number in range(stages or len(lanes))],
        lanes=[Lane(label=f"rank {rank}", note=f"note {rank}", boxes=boxes) for rank, boxes in enumerate(lanes)],
    )


def box(kind: str, start: float, end: float, *, stage: int = 0, microbatch: int = 0) -> ScheduleBox:
    return ScheduleBox(kind=kind, stage=stage, microbatch=microbatch, start=start, end=end)


def boxes(svg: str) -> list[dict[str, str]]:
    """The rectangle of every box with its hover text and its number."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return [
        {
            **group.find(f"{SVG}rect").attrib,
            "title": group.findtext(f"{SVG}title"),
            "text": group.findtext(f"{SVG}text"),
        }
        for group in groups
    ]


def test_a_box_lies_where_its_time_is() -> None:
    drawn = boxes(schedule_svg(drawing([box("F", 0, 1), box("B", 2, 4)], [box("F", 1, 2, stage=1)])))
    lefts, widths = ([float(one[side]) for one in drawn] for side in ("x", "width"))
    second = (lefts[1] - lefts[0]) / 2
    assert lefts[2] - lefts[0] == pytest.approx(second, abs=0.02)
    assert widths == pytest.approx([second - 1, 2 * second - 1, second - 1], abs=0.02)
    first, second_box, other_lane = (float(one["y"]) for one in drawn)
    assert first == second_box < other_lane


def test_each_kind_has_its_colour_and_a_place_in_the_legend() -> None:
    svg = schedule_svg(drawing([box("F", 0, 1), box("I", 1, 2), box("W", 2, 3)]))
    assert [one["class"] for one in boxes(svg)] == ["bar tone-0", "bar tone-1", "bar tone-2"]
    words = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"forward", "backward: input", "backward: weights", "waiting", "rank 0", "note 0", "seconds"} <= set(words)
    assert "backward" not in words


def test_pointing_at_a_box_tells_what_it_is() -> None:
    drawn = boxes(schedule_svg(drawing([box("B", 1.5, 3, microbatch=7)])))
    assert drawn[0]["title"] == "backward of microbatch 7\nstage 0\n1.5 to 3 seconds"
    assert drawn[0]["text"] == "7"


def test_later_stages_of_a_rank_are_lighter() -> None:
    lanes = [[box("F", 0, 1, stage=0), box("F", 1, 2, stage=2)], [box("F", 0, 1, stage=1), box("F", 1, 2, stage=3)]]
    svg = schedule_svg(drawing(*lanes, stages=4))
    assert [float(one["fill-opacity"]) for one in boxes(svg)] == [1, 0.35, 1, 0.35]
    assert "forward, by chunk" in svg


def test_a_long_schedule_stays_within_its_width_and_leaves_numbers_out() -> None:
    many = [box("F", start, start + 1, microbatch=start) for start in range(1000)]
    svg = schedule_svg(drawing(many))
    assert float(ElementTree.fromstring(svg).get("width")) < WIDEST + 400
    assert {one["text"] for one in boxes(svg)} == {None}
    assert all(float(one["width"]) > 0 for one in boxes(svg))


def test_words_are_only_words(tmp_path: Path) -> None:
    path = write_drawing(tmp_path / "a.svg", drawing([box("F", 0, 1)], title="</text><script>alert(1)</script>"))
    tree = ElementTree.parse(path)
    assert list(tree.iter(f"{SVG}script")) == []
    assert "</text><script>alert(1)</script>" in [text.text for text in tree.iter(f"{SVG}text")]


def test_a_drawing_fetches_nothing_and_knows_dark_screens() -> None:
    svg = schedule_svg(drawing([box("F", 0, 1)]))
    assert "prefers-color-scheme: dark" in svg
    assert svg.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "url(" not in svg
