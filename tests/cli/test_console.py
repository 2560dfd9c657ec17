"""Progress on a terminal: one line that fits, and everything that is said above it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.cli.main import main
from ropewalk.cli.progress_lines import Console, closing_consoles
from ropewalk.config.terminal import redraws
from tests.flow.tiny import write_tiny
from tests.heard import Heard
from tests.screen import Screen, resize, terminal, written

WIDTHS = (80, 100, 160)
ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("CI", "COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple]:
    """What a real run tells from raw files to the report."""
    folder = tmp_path_factory.mktemp("told")
    write_tiny(folder)
    heard = Heard()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flow.run("tiny.toml", ["train.steps=40", "train.log_every_steps=10"], progress=heard)
    return heard.calls


def frames_of(calls: list[tuple], columns: int) -> Iterator[tuple[str, str, Screen]]:
    """After each call: the task, the last line of the screen and the screen. A second passes with every call."""
    clock = Clock()
    screen, task = Screen(columns), ""
    with terminal(columns) as (stream, reader), closing_consoles():
        console = Console(stream, clock=clock, frames_per_s=0)
        for name, *arguments in calls:
            clock.now += 1
            getattr(console, name)(*arguments)
            if name == "advance":
                console._live.show()
            task = arguments[0] if name == "begin" else "" if name == "end" else task
            screen.feed(written(reader))
            yield task, screen.last, screen


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_run_shows_percent_pace_and_time_left_on_a_line_that_fits(told: list[tuple], columns: int) -> None:
    seen: dict[str, str] = {}
    for task, last, screen in frames_of(told, columns):
        if task and not last.startswith(task):
            raise AssertionError(f"{task} is not on the last line: {last}")
        seen[task] = last if "ETA" in last and "ETA -" not in last else seen.get(task, "")
        assert screen.wrapped == 0
        assert max(map(len, screen.lines)) < columns
    assert re.match(r"train  [━─]+ +\d+%  loss \d\.\d+  [\d,]+ tokens/s  ETA \d", seen["train"])
    assert "score" in seen  # one call to the model answers so few requests
    assert re.match(r"read  [━─]+ +\d+%  .*/s  ETA \d", seen["read"])
    assert ("data wait" in seen["train"]) == (columns == 160)
    text = screen.text
    assert re.search(r"step 40: validation loss \d\.\d+ \(4 held-out sequences\)$", text, flags=re.MULTILINE)
    assert "━" not in text, "lines that stay have no bar"
    assert text.index("kept 40 of 40 documents") < text.index("step 40: validation loss") < text.index("score")


def test_what_is_said_stands_above_the_line_and_wraps_at_words() -> None:
    clock, screen = Clock(), Screen(40)
    with terminal(40) as (stream, reader), closing_consoles():
        console = Console(stream, clock=clock, frames_per_s=0)
        console.begin("read", 100, "B")
        console.say("warning: " + "seventeen " * 8 + "日本語のファイル.txt")
        screen.feed(written(reader))
    assert screen.last.startswith("read")
    above = screen.text.split("read ")[0].splitlines()
    assert [line.split()[0] for line in above] == ["warning:", "seventeen", "seventeen", "日本語のファイル.txt"]
    assert max(map(len, above)) < 40


def test_the_line_follows_the_width_of_the_terminal() -> None:
    clock = Clock()
    with terminal(160) as (stream, reader), closing_consoles():
        console = Console(stream, clock=clock, frames_per_s=0)
        console.begin("train", 100, "steps")
        for step in range(9):
            clock.now += 1
            console.advance(step, f"loss 2.{step}000  1,000 tokens/s  grad 0.50  lr 1.00e-03")
        lengths = []
        for columns in (160, 80, 40, 24, 12):
            screen = Screen(columns)
            resize(stream.fileno(), columns)
            written(reader)
            console._live.show()
            screen.feed(written(reader))
            assert screen.wrapped == 0
            lengths.append(len(screen.last))
            assert "8%" in screen.last
            assert "ETA" in screen.last or columns == 12
    assert lengths == sorted(lengths, reverse=True)


def test_a_verb_that_fails_leaves_no_line_behind_and_what_libraries_print_goes_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen(80)
    with terminal(80) as (stream, reader):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(RuntimeError):
            _fail_while_drawing()
        print("the error", file=sys.stderr)
        screen.feed(written(reader))
    assert [line for line in screen.text.splitlines() if line] == ["from a library", "the error"]


def _fail_while_drawing() -> None:
    with closing_consoles():
        console = Console()
        console.begin("train", 10, "steps")
        console.advance(3)
        print("from a library", file=sys.stderr)
        raise RuntimeError


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": ""}, {"TERM": "xterm", "CI": "true"}])
def test_dumb_terminals_and_continuous_integration_get_plain_lines(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with terminal(80) as (stream, reader):
        console = Console(stream)
        console.begin("read", 100, "B")
        console.advance(50)
        console.end()
        text = written(reader)
    assert "\x1b" not in text
    assert text.startswith("read         done")


def test_no_color_leaves_the_line_and_takes_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(80) as (stream, reader), closing_consoles():
        console = Console(stream, frames_per_s=0)
        console.begin("read", 100, "B")
        text = written(reader)
    assert "read" in text
    assert not re.search(r"\x1b\[3\d", text)


def test_a_file_gets_aligned_lines_now_and_then_and_needs_no_rich() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock)
    console.begin("train", 100, "steps")
    for step in range(100):
        clock.now += 1
        console.advance(step + 1, "loss 2.0000  1,000 tokens/s" if step % 5 == 4 else "")
    console.end()
    lines = file.getvalue().splitlines()
    assert lines[0] == "train          2% of 100 steps  ETA 3 min 16 s"
    assert lines[1] == "train         15% of 100 steps  ETA 1 min 31 s    loss 2.0000  1,000 tokens/s"
    assert len(lines) == 11
    assert lines[-1] == "train        done  (1 min 40 s)"
    assert not redraws(file)


def test_the_command_line_draws_on_a_terminal(tmp_path: Path) -> None:
    """In a process of its own, on a terminal of 80 columns."""
    write_tiny(tmp_path)
    screen = Screen(80)
    seen = set()
    with terminal(80) as (stream, reader):
        command = [sys.executable, "-m", "ropewalk", "prepare", "tiny.toml"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stream
        )
        while process.poll() is None:
            time.sleep(0.02)
            screen.feed(written(reader))
            seen.add(screen.last)
        screen.feed(written(reader))
    assert process.returncode == 0, screen.text
    assert any(re.match(r"measure  [━─]+ +\d+%  ", line) for line in seen), seen
    assert screen.wrapped == 0
    assert "write shards" in screen.last or "kept 40" in screen.last


def test_results_in_a_file_hold_nothing_of_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with terminal(80) as (stream, reader):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit):
            main(["prepare", "tiny.toml", "--json"])
        assert "\x1b" in written(reader)
        assert sys.stderr is stream
    assert out.getvalue().startswith("{")
    assert "\x1b" not in out.getvalue()
