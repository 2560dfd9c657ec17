"""The curve that other tools get is the true one: of live and dead runs, after restarts, rollbacks and kills."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ropewalk.base.errors import UserError
from ropewalk.base.events import EventLog, read_events, steps
from ropewalk.base.files import locked
from ropewalk.flow.view_runs import RunWatch
from ropewalk.monitor.follow import CURVE_FIELDS

START = 1_760_000_000.0


def diary(draw: random.Random, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a run writes that is killed, restored, rolled back and started anew."""
    step = 0
    for number in range(count):
        kind = draw.random()
        if kind < 0.03:
            step = draw.randrange(step + 1)
            yield "restored", {"step": step, "path": "checkpoints/x"}
        elif kind < 0.04:
            step = draw.choice([0, step])
            yield "train_started", {"step": step}
        elif kind < 0.15 and step:
            yield "validation", {"step": step, "loss": 2 + number / 7, "bits_per_byte": 1.5, "seconds": 0.1}
        elif kind < 0.16:
            yield "warning", {"message": "none"}
        else:
            step += 10
            loss = draw.choice([3.0 + number / 3, 3.0 + number / 3, float("nan")])
            yield "step", {"step": step, "tokens": 1000 * step, "loss": loss, "lr": 1e-3 / (1 + step), "mfu": None}


def new_run(folder: Path) -> Path:
    run = folder / "runs" / "one"
    (run / "stages").mkdir(parents=True)
    EventLog(run).close()
    return run


def write(run: Path, events: list[tuple[str, dict[str, Any]]]) -> None:
    with EventLog(run) as log:
        for kind, fields in events:
            log.write(kind, **fields)


def truth(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Every figure by step, from the reader that keeps the last account of each step."""
    events = list(read_events(run / "events.jsonl"))
    found: dict[str, list[tuple[int, float]]] = {}
    for figure in CURVE_FIELDS:
        for event in steps(events, figure.kind):
            if event.get(figure.field) is not None:
                found.setdefault(figure.name, []).append((event["step"], float(event[figure.field])))
    return found


def table_of(path: Path) -> dict[str, list[tuple[int, float]]]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = [int(row["step"]) for row in rows]
    assert numbers == sorted(set(numbers)), "every step has one row"
    found: dict[str, list[tuple[int, float]]] = {}
    for figure in CURVE_FIELDS:
        for row in rows:
            if row[figure.column]:
                found.setdefault(figure.name, []).append((int(row["step"]), float(row[figure.column])))
    return found


def charts_of(reader: EventAccumulator) -> dict[str, list[tuple[int, float]]]:
    reader.Reload()
    charts = {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}
    return {name: points for name, points in charts.items() if points}


def reader_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "one"), size_guidance={"scalars": 0})


def narrow(curves: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard keeps numbers, in 32 bits; nan is made equal to nan."""

    def kept(value: float) -> Any:
        return "nan" if math.isnan(value) else struct.unpack("f", struct.pack("f", value))[0]

    return {name: [(step, kept(value)) for step, value in points] for name, points in curves.items()}


@pytest.mark.parametrize("seed", range(12))
def test_trackers_hold_the_true_curve_at_every_moment(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    run, table, charts = new_run(tmp_path), tmp_path / "one.csv", tmp_path / "charts"
    to = [f"csv={table}", f"tensorboard={charts}"]
    events = iter(list(diary(draw, 300)))
    while some := list(itertools.islice(events, draw.randrange(1, 60))):
        write(run, some)
        with RunWatch(run, to=to) as watch:  # a follower starts, looks several times and is stopped
            for _ in range(draw.randrange(4)):
                watch.update()
                write(run, list(itertools.islice(events, draw.randrange(20))))
            watch.update()
        for path in (table, *(charts / "one").iterdir()):
            if draw.random() < 0.3:  # as a kill leaves what was being written
                path.write_bytes(path.read_bytes()[: -draw.randrange(1, 200)])
                with RunWatch(run, to=to):
                    pass
        assert narrow(table_of(table)) == narrow(truth(run))
        assert narrow(charts_of(reader_of(charts))) == narrow(truth(run))


def test_a_tensorboard_that_reads_along_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    run, charts = new_run(tmp_path), tmp_path / "charts"
    write(run, [("step", {"step": step, "loss": 9.0}) for step in range(10, 110, 10)])
    with RunWatch(run, to=[f"tensorboard={charts}"]) as watch:
        live = reader_of(charts)
        assert [step for step, _ in charts_of(live)["train/loss"]] == list(range(10, 110, 10))
        write(run, [("restored", {"step": 50})])
        watch.update()
        assert charts_of(live)["train/loss"] == [(step, 9.0) for step in range(10, 60, 10)]
        write(run, [("step", {"step": 60, "loss": 1.0})])
        watch.update()
        assert charts_of(live)["train/loss"] == [*((step, 9.0) for step in range(10, 60, 10)), (60, 1.0)]


def test_a_run_that_is_killed_before_its_first_checkpoint_keeps_nothing_of_its_first_start(tmp_path: Path) -> None:
    run, table = new_run(tmp_path), tmp_path / "one.csv"
    write(run, [("train_started", {"step": 0}), *(("step", {"step": step, "loss": 9.0}) for step in (10, 20, 30))])
    write(run, [("train_started", {"step": 0}), ("step", {"step": 10, "loss": 8.0})])
    with RunWatch(run, to=[f"csv={table}"]):
        pass
    assert table_of(table)["train/loss"] == [(10, 8.0)]


def test_a_follower_that_finds_everything_written_writes_nothing(tmp_path: Path) -> None:
    run, table, charts = new_run(tmp_path), tmp_path / "one.csv", tmp_path / "charts"
    write(run, list(diary(random.Random(1), 200)))
    to = [f"csv={table}", f"tensorboard={charts}"]
    with RunWatch(run, to=to):
        pass
    (file,) = (charts / "one").iterdir()
    before = table.read_bytes(), file.read_bytes()
    with RunWatch(run, to=to) as watch:
        watch.update()
    assert (table.read_bytes(), file.read_bytes()) == before
    assert list((charts / "one").iterdir()) == [file]


def test_a_run_that_takes_the_place_of_another_takes_its_curves_too(tmp_path: Path) -> None:
    run, table, charts = new_run(tmp_path), tmp_path / "one.csv", tmp_path / "charts"
    write(run, list(diary(random.Random(1), 80)))
    with RunWatch(run, to=[f"csv={table}", f"tensorboard={charts}"]) as watch:
        run.rename(run.with_name("one.1"))
        write(new_run(tmp_path), list(diary(random.Random(2), 80)))
        watch.update()
        assert narrow(table_of(table)) == narrow(truth(run))
        assert narrow(charts_of(reader_of(charts))) == narrow(truth(run))


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run, table = new_run(tmp_path), tmp_path / "one.csv"
    write(run, [("step", {"step": 10, "loss": 2.0})])
    line = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(line[:40])
    with RunWatch(run, to=[f"csv={table}"]) as watch:
        assert table_of(table) == {}
        with open(run / "events.jsonl", "ab") as file:
            file.write(line[40:])
        watch.update()
        assert table_of(table)["train/loss"] == [(10, 2.0)]


def test_files_of_others_are_not_written(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine, other, busy = tmp_path / "mine.csv", tmp_path / "two.csv", tmp_path / "busy.csv"
    mine.write_text("name,age\nx,3\n")
    with (
        pytest.raises(UserError, match=r"mine.csv: this file is not a table of a run; name another"),
        RunWatch(run, to=[f"csv={mine}"]),
    ):
        pass
    write(run, [("step", {"step": 10, "loss": 2.0})])
    with RunWatch(run, to=[f"csv={other}"]):
        pass
    two = run.with_name("two")
    run.rename(two)
    with pytest.raises(UserError, match="holds another run than two"), RunWatch(two, to=[f"csv={other}"]):
        pass
    with (
        RunWatch(two, to=[f"csv={busy}"]),
        pytest.raises(UserError, match="another process writes"),
        RunWatch(two, to=[f"csv={busy}"]),
    ):
        pass
    assert mine.read_text() == "name,age\nx,3\n"


@given(st.binary(max_size=300))
def test_records_are_those_of_tensorboard(message: bytes) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    from ropewalk.monitor.trackers import tensorboard as ours

    assert ours._masked(message) == masked_crc32c(message)


def test_a_live_run_is_followed_to_its_end_and_a_stopped_one_until_somebody_continues_it(tmp_path: Path) -> None:
    run, table = new_run(tmp_path), tmp_path / "one.csv"
    work = iter(
        [
            [("run_started", {}), ("step", {"step": 10, "loss": 2.0})],
            [("step", {"step": 20, "loss": 1.5})],
            [("step", {"step": 30, "loss": 1.0}), ("run_finished", {"seconds": 1.0})],
        ]
    )
    holding = locked(run)
    holding.__enter__()

    def meanwhile(seconds: float) -> None:
        assert seconds >= 1
        some = next(work)
        write(run, some)
        if some[-1][0] == "run_finished":
            holding.__exit__(None, None, None)

    with RunWatch(run, to=[f"csv={table}"]) as watch:
        assert list(watch.looks(pause=meanwhile)) == [False, False, False, True]
    assert [step for step, _ in table_of(table)["train/loss"]] == [10, 20, 30]


def test_a_stopped_run_is_over_unless_one_waits_for_whoever_continues_it(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    old = {"format": 1, "time": START, "rank": 0, "kind": "run_started"}
    (run / "events.jsonl").write_text(json.dumps(old) + "\n")
    with RunWatch(run) as watch:
        assert (watch.over(), watch.over(waits=True)) == (True, False)
        write(run, [("train_finished", {"step": 3})])
        watch.update()
        assert watch.over(waits=True)
