"""What one process tells of its progress, another shows."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.progress import Silent
from ropewalk.base.relay import Relay, Tail, replay
from tests.heard import Heard


def test_the_calls_arrive_here_and_there_in_order(tmp_path: Path) -> None:
    here, there = Heard(), Heard()
    relay, tail = Relay(tmp_path / "logs" / "progress.jsonl", here), Tail(tmp_path / "logs" / "progress.jsonl")
    relay.begin("train", 8, "steps")
    relay.advance(3, "loss 2.5\nand more")
    replay(tail.lines(), there)
    relay.say("“ropes”")
    relay.begin("copy", None, "B")
    relay.end("done")
    replay(tail.lines(), there)
    assert there.calls == here.calls
    assert [call[0] for call in there.calls] == ["begin", "advance", "say", "begin", "end"]


def test_what_was_written_before_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    Relay(path, Silent()).say("yesterday")
    tail, heard = Tail(path), Heard()
    Relay(path, Silent()).say("today")
    replay(tail.lines(), heard)
    assert heard.calls == [("say", "today")]


def test_a_line_torn_by_a_kill_is_skipped() -> None:
    heard = Heard()
    replay([b'["adv', b'["say", "again"]', b""], heard)
    assert heard.calls == [("say", "again")]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"-"))), st.integers(1, 9))
def test_a_tail_gives_every_whole_line_once_however_it_is_written(lines: list[bytes], piece: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        tail, found = Tail(path), []
        text = b"".join(line + b"\n" for line in lines)
        for start in range(0, len(text), piece):
            with open(path, "ab") as file:
                file.write(text[start : start + piece])
            found += tail.lines()
    assert found == lines


def test_advances_without_a_note_are_thinned_out_and_others_are_not(tmp_path: Path) -> None:
    here, there = Heard(), Heard()
    path = tmp_path / "progress.jsonl"
    tail = Tail(path)
    relay = Relay(path, here)
    for step in range(2000):
        relay.advance(step, "loss 2.5" if step % 500 == 0 else "")
    replay(tail.lines(), there)
    assert len(here.calls) == 2000
    assert [call for call in there.calls if call[2]] == [call for call in here.calls if call[2]]
    assert len(there.calls) < 1000
