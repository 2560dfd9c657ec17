"""Damage to any file of a run, its data, stages and caches is refused by name or healed: never silent, never a bug."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk.base.errors import DamagedFile
from ropewalk.base.events import EventLog, read_events
from ropewalk.base.progress import Silent
from ropewalk.flow.chaos_trials import damage as module
from ropewalk.flow.chaos_trials import damage_readers
from ropewalk.flow.chaos_trials.damage import DAMAGES, WRONG, Campaign, Case, by_command, tabulate
from ropewalk.flow.run_or_recipe import resolve_recipe
from ropewalk.prepare import checksums
from ropewalk.store.kinds import KINDS, UNREAD, kind_of
from tests.cli.conftest import Call, call, tiny  # noqa: F401 - fixtures
from tests.flow.tiny import write_tiny

EVERY = (
    'prepare.deduplicate.substring.action="mask"',
    "prepare.deduplicate.substring.length=60",
    'prepare.ngrams.unit="words"',
    "prepare.ngrams.length=5",
    'load.packing="best-fit"',
)
"""Settings under which the tiny recipe leaves files of every kind that a run has."""
QUICK = 60


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """A run to damage, made once, which every case leaves as it was."""
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Checksums of inputs are kept once these have not been written for a while: here, at once.
        patch.setattr(checksums, "SETTLED_NS", -(10**12))
        write_tiny(folder)
        repeated = " ".join(f"hemp {number} strand" for number in range(20)) + "."
        for number in (3, 4):
            with open(folder / "corpus" / f"{number}.txt", "a") as file:
                file.write(f"{number} {repeated}\n")
        yield Campaign.make(resolve_recipe("tiny.toml", EVERY), folder / "tiny.chaos", Silent())


def wrong(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.outcome in WRONG]


def test_every_kind_of_file_and_damage_is_refused_by_name_or_healed(campaign: Campaign) -> None:
    cases = [campaign.case(number, command=by_command(number, 20)) for number in range(QUICK)]
    assert wrong(cases) == []
    assert {case.kind for case in cases} == set(campaign.files)
    assert {case.damage for case in cases} == set(DAMAGES)
    in_all = tabulate(cases)["in all"]
    assert in_all["refused"] > 20 < QUICK - in_all["harmless"]
    assert in_all["healed"] > 3


def test_every_kind_of_file_is_there_to_be_damaged_and_nothing_else_is(campaign: Campaign) -> None:
    assert set(damage_readers.READERS) == {kind.pattern for kind in KINDS} == set(campaign.files)
    live = campaign.scratch / "live"
    names = [campaign._name(path) for path in live.rglob("*") if path.is_file() and "corpus" not in path.parts]
    unread = ("*.lock", "*.partial", *UNREAD)
    unknown = [name for name in names if kind_of(name) is None]
    assert [name for name in unknown if not any(fnmatch.fnmatchcase(name, pattern) for pattern in unread)] == []


def test_everything_is_put_back_after_a_case(campaign: Campaign) -> None:
    for number in (7, 40, 55):
        campaign.case(number, command=True)
    sound, live = campaign.scratch / "sound", campaign.scratch / "live"
    for path in (path for path in sound.rglob("*") if path.is_file() and path.name != ".lock"):
        assert (live / path.relative_to(sound)).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize(
    ("reader", "outcome"),
    [
        (lambda place, path: path.read_bytes() if path.exists() else b"", "silent"),
        (lambda place, path: json.loads("{"), "traceback"),
        (lambda place, path: (_ for _ in ()).throw(DamagedFile("something is damaged")), "misleading"),
    ],
)
def test_a_reader_that_does_not_notice_is_told_by_its_number(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, reader: object, outcome: str
) -> None:
    kind = "run/plan.json"
    path = campaign.files[kind][0]
    number = next(number for number in range(1000) if campaign.what(number) == (kind, "flip a bit"))
    monkeypatch.setitem(damage_readers.READERS, kind, reader)
    monkeypatch.setitem(campaign._values, path, path.read_bytes())
    assert campaign.case(number).outcome == outcome


def test_advice_to_delete_something_intact_is_misleading(campaign: Campaign) -> None:
    path, other = campaign.files["run/plan.json"][0], campaign.files["run/config.toml"][0]
    assert campaign._refused(path, f"{path}: this plan is damaged; delete {other} and go on")[0] == "misleading"
    assert campaign._refused(path, f"{path}: this plan is damaged; delete {path} and go on")[0] == "refused"


def test_the_command_prints_the_table_and_leaves_nothing(
    tiny: Path,  # noqa: F811
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = call("chaos", "tiny.toml", "train.steps=2", "--damage", "3", "--seed", "5")
    assert ended.status == 0, ended.out + ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[0][1:] == list(module.OUTCOMES)
    assert lines[-1][:2] == ["in", "all"]
    assert sum(map(int, lines[-1][2:])) == 3
    assert not list((tiny / "runs").iterdir())
    real = Campaign.case
    monkeypatch.setattr(Campaign, "make", lambda *_: object.__new__(Campaign))
    silent = Case(6, "run/plan.json", "runs/tiny/plan.json", "delete", "silent", "not noticed", False)
    monkeypatch.setattr(Campaign, "case", lambda self, number, **_: silent)
    ended = call("chaos", "tiny.toml", "--damage", "1", "--seed", "6")
    assert ended.status == 1
    assert "silent, --seed 6: delete in runs/tiny/plan.json: not noticed" in ended.out
    assert real is not Campaign.case


def test_a_changed_bit_in_an_event_costs_that_event_and_alters_none(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        for step in range(3):
            log.write("step", step=step, loss=1.5)
    data, events = log.path.read_bytes(), list(read_events(log.path))
    first = data.index(b"\n")
    for place in range(first + 1):
        for bit in (0, 4):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            log.path.write_bytes(changed)
            found = list(read_events(log.path))
            assert all(event in events for event in found)
            assert found in (events[1:], events[2:])


@pytest.mark.slow
def test_two_thousand_damages_of_which_two_hundred_go_through_the_command(campaign: Campaign) -> None:
    logging.getLogger("ropewalk").setLevel(logging.WARNING)
    cases = [campaign.case(number, command=by_command(number, 9)) for number in range(2000)]
    assert wrong(cases) == []
    assert sum(case.command for case in cases) >= 200
    assert {case.kind for case in cases if case.command} == set(campaign.files)
    told = [f"{kind:44}" + "".join(f"{n:11d}" for n in row.values()) for kind, row in tabulate(cases).items()]
    print("\n".join(told))
    assert {(case.kind, case.damage) for case in cases} == {(k, d) for k in campaign.files for d in DAMAGES}
