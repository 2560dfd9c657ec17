"""The diary survives crashes, odd values and full disks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import StorageError
from ropewalk.base.events import EventLog, events_path, read_events, steps


def kinds(path: Path) -> list[str]:
    return [event["kind"] for event in read_events(path)]


def test_events_are_read_in_the_order_they_were_written_over_two_openings(tmp_path: Path) -> None:
    for names in (("a", "b"), ("c",)):
        with EventLog(tmp_path / "run") as log:
            for name in names:
                log.write(name, step=1, text="ü\u2028\n")
    (first, *_) = events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event["kind"] for event in events] == ["a", "b", "c"]
    assert first | {"time": 0} == {
        "format": 2,
        "time": 0,
        "rank": 0,
        "kind": "a",
        "step": 1,
        "text": "ü\u2028\n",
    }


def test_each_rank_has_its_own_file(tmp_path: Path) -> None:
    with EventLog(tmp_path, rank=3) as log:
        log.write("a")
    assert log.path == events_path(tmp_path, rank=3) == tmp_path / "events-3.jsonl"
    assert next(read_events(log.path))["rank"] == 3
    assert list(read_events(events_path(tmp_path))) == []


def test_a_line_torn_at_any_byte_costs_only_itself(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write("whole")
        log.write("torn", text="é")
    whole, torn = log.path.read_bytes().splitlines(keepends=True)
    for cut in range(len(torn) - 1):
        log.path.write_bytes(whole + torn[:cut])
        with EventLog(tmp_path) as again:
            assert kinds(log.path) == ["whole"]
            again.write("next")
        assert kinds(log.path) == ["whole", "next"]


@pytest.mark.parametrize("tail", [b"\0" * 50, b"[1, 2]\n", b"3\n", b'{"kind": "x"}\n', b"\xff\xfe\n", b"\n\n"])
def test_foreign_lines_are_skipped(tmp_path: Path, tail: bytes) -> None:
    with EventLog(tmp_path) as log:
        log.write("a")
    log.path.write_bytes(log.path.read_bytes() + tail)
    with EventLog(tmp_path) as log:
        log.write("b")
    assert kinds(log.path) == ["a", "b"]


def test_numbers_that_are_not_finite_are_text_at_any_depth(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write("step", loss=math.nan, result={"high": [math.inf], "low": (-math.inf, 1.5)})
    event = json.loads(log.path.read_text(), parse_constant=pytest.fail)
    assert event["loss"] == "nan"
    assert event["result"] == {"high": ["inf"], "low": ["-inf", 1.5]}


def test_a_command_that_is_not_utf8_can_be_recorded(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write("run_started", command="train \udcff")
    assert next(read_events(log.path))["command"] == "train \udcff"


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.close()
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    events_path(tmp_path).symlink_to("/dev/full")
    log = EventLog(tmp_path)
    with pytest.raises(StorageError, match=r"writing .*events\.jsonl: No space left on device"):
        log.write("a")
    with pytest.raises(StorageError):
        log.close()


def step(number: int, kind: str = "step", **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "step": number, **fields}


def test_a_restore_undoes_the_steps_after_it() -> None:
    events = [step(1), step(2), step(3), step(1, "restored"), step(2, again=True)]
    assert steps(events) == [step(1), step(2, again=True)]
    assert steps(events, "validation") == []


@given(st.lists(st.tuples(st.sampled_from(["step", "saved", "restored"]), st.integers(0, 6)), max_size=20))
def test_the_steps_that_count_are_those_no_later_restore_undid(history: list[tuple[str, int]]) -> None:
    events = [step(number, kind, nth=nth) for nth, (kind, number) in enumerate(history)]
    expected: dict[int, dict[str, Any]] = {}
    for nth, event in enumerate(events):
        undone = any(e["kind"] == "restored" and e["step"] < event["step"] for e in events[nth:])
        if event["kind"] == "step" and not undone:
            expected[event["step"]] = event
    assert steps(events) == [expected[number] for number in sorted(expected)]
