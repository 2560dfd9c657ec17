"""More steps and phases for runs that have begun, through the command line: the same bits where they are promised."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ropewalk.base.events import Event, read_events, steps
from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.cli.main import main
from tests.train.runs import final_files, quick

from .tiny import write_tiny

RUN = Path("runs/tiny")


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


Call = Callable[..., Ended]


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit):
            main(["prepare", "tiny.toml", "--json"])
    shutil.rmtree(folder / "runs")
    return folder


@pytest.fixture
def here(prepared_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny recipe and its data; we stand in it."""
    shutil.copytree(prepared_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    quick(monkeypatch)
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        try:
            main(list(arguments))
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ended(status, captured.out, captured.err)

    return run


def done(ended: Ended) -> Ended:
    assert ended.status == 0, ended.err
    return ended


def events(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def curve(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and learning rate, as they count."""
    found = steps(list(read_events(run / "events.jsonl")))
    return [(event["step"], event["loss"], event["lr"]) for event in found]


def settings(run: Path) -> dict:
    return tomllib.loads((run / "config.toml").read_text())


SCHEDULES = {
    "constant": (["shape=constant"], []),
    "step": (["shape=step", "milestones=[4,9]"], []),
    "adaptive": (["shape=adaptive", "patience=1", "min_delta=100.0"], []),
    "wsd, from before its decay": (["shape=wsd", "decay_share=0.34"], []),
    "cosine": (["shape=cosine"], ["train.schedule.restarts=[6]"]),
    "linear": (["shape=linear"], ["train.schedule.restarts=[6]"]),
}


# Of schedules that go on, and of those that begin anew, one of each kind is quick.
SLOW = ("step", "adaptive", "linear")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SCHEDULES])
def test_more_steps_give_the_bits_of_a_run_that_had_them_from_the_start(name: str, here: Path, call: Call) -> None:
    shape, restarts = SCHEDULES[name]
    given = [f"train.schedule.{setting}" for setting in shape]
    done(call("train", "tiny.toml", *given))
    first = curve(RUN)
    ended = done(call("train", "tiny.toml", *given, "train.steps=12"))
    done(call("train", "tiny.toml", *given, "train.steps=12", "name=straight", *restarts))
    assert final_files(RUN) == final_files(Path("runs/straight"))
    # The diary has one curve, and tells how it went on.
    assert curve(RUN) == curve(Path("runs/straight"))
    (continued,) = events(RUN, "continued")
    kept = 4 if name.startswith("wsd") else 6
    assert [continued[key] for key in ("step", "from_step", "before", "steps")] == [6, kept, 6, 12]
    assert continued["message"] in ended.err
    assert curve(RUN)[: kept // 2] == first[: kept // 2]
    assert settings(RUN)["train"]["schedule"]["restarts"] == ([6] if restarts else [])
    assert json.loads(done(call("monitor", str(RUN), "--json")).out)["step"]["step"] == 12
    # The same command has nothing to do.
    assert "continuing" not in done(call("train", "tiny.toml", *given, "train.steps=12")).err


def test_a_warm_up_that_follows_from_the_steps_stays_as_it_was(here: Path, call: Call) -> None:
    recipe = Path("tiny.toml")
    recipe.write_text(recipe.read_text().replace("schedule.warmup_steps = 2\n", "schedule.shape = 'constant'\n"))
    done(call("train", "tiny.toml", "train.steps=10"))
    ended = done(call("train", "tiny.toml", "train.steps=21"))
    assert "train.schedule.warmup_steps=1" in ended.err
    done(call("train", "tiny.toml", "train.steps=21", "name=straight", "train.schedule.warmup_steps=1"))
    assert final_files(RUN) == final_files(Path("runs/straight"))
    # It is the run's from now on: neither the same nor a longer run asks for it again.
    done(call("train", "tiny.toml", "train.steps=21"))
    done(call("train", "tiny.toml", "train.steps=22"))
    assert settings(RUN)["train"]["schedule"]["warmup_steps"] == 1


def test_cycles_follow_one_another_and_everything_after_training_is_done_again(here: Path, call: Call) -> None:
    done(call("run", "tiny.toml"))
    before = json.loads((RUN / "summary.json").read_text())
    done(call("run", "tiny.toml", "train.steps=10"))
    ended = done(call("run", "tiny.toml", "train.steps=14"))
    assert "the first 10 steps stay; a new cosine cycle of 4 steps follows: learning rate up to 0.003" in ended.err
    after = json.loads((RUN / "summary.json").read_text())
    assert (before["steps"], after["steps"], after["tokens"]) == (6, 14, 14 * 4 * 32)
    assert after["bits_per_byte"] != before["bits_per_byte"]
    assert after["seconds"]["train"] > before["seconds"]["train"]
    assert json.loads((RUN / "evaluation" / "results.json").read_text())["step"] == 14
    report = (RUN / "report.html").read_text()
    assert "the first 10 steps stay; a new cosine cycle of 4 steps follows" in report
    done(call("train", "tiny.toml", "train.steps=14", "name=straight", "train.schedule.restarts=[6,10]"))
    assert final_files(RUN) == final_files(Path("runs/straight"))
    rates = [rate for _, _, rate in curve(RUN)]
    assert rates[2] < rates[3] > rates[4] < rates[5]


def test_a_decay_that_is_taken_back_stays_beside_the_checkpoints(here: Path, call: Call) -> None:
    wsd = ("train.schedule.shape=wsd", "checkpoint.keep_last=1", "checkpoint.save_every_steps=100")
    done(call("train", "tiny.toml", *wsd))
    assert [path.name for path in list_checkpoints(RUN / "checkpoints")] == ["step-00000005", "step-00000006"]
    decayed = final_files(RUN)
    done(call("train", "tiny.toml", *wsd, "train.steps=20"))
    aside = RUN / "checkpoints" / "decayed" / "step-00000006"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == decayed
    assert [path.name for path in list_checkpoints(RUN / "checkpoints")] == ["step-00000016", "step-00000020"]


def test_without_a_checkpoint_from_before_its_decay_wsd_warms_up_again(here: Path, call: Call) -> None:
    wsd = ("train.schedule.shape=wsd", "checkpoint.save_every_steps=100")
    done(call("train", "tiny.toml", *wsd))
    shutil.rmtree(RUN / "checkpoints" / "step-00000005")
    ended = done(call("train", "tiny.toml", *wsd, "train.steps=12"))
    assert "the first 6 steps stay (no checkpoint from before its decay is kept); a new wsd cycle" in ended.err
    done(call("train", "tiny.toml", *wsd, "train.steps=12", "name=straight", "train.schedule.restarts=[6]"))
    assert final_files(RUN) == final_files(Path("runs/straight"))


def test_a_run_that_stopped_early_goes_on_from_its_best_weights(here: Path, call: Call) -> None:
    early = ("train.early_stop.patience=1", "train.early_stop.min_delta=100.0", "train.steps=30")
    done(call("train", "tiny.toml", *early))
    assert read_checkpoint_manifest(list_checkpoints(RUN / "checkpoints")[-1]).step == 6
    ended = done(call("train", "tiny.toml", *early, "train.steps=40", "train.validate_every_steps=20"))
    assert "the first 6 steps stay (it stopped early at step 6); a new cosine cycle of 34 steps follows" in ended.err
    assert read_checkpoint_manifest(list_checkpoints(RUN / "checkpoints")[-1]).step == 40
    assert done(call("train", "tiny.toml", *early, "train.steps=40", "train.validate_every_steps=20")).status == 0


PHASES = """
[[train.phases]]
name = "first"
steps = 6

[[train.phases]]
name = "second"
steps = 4
sequence_length = 48
schedule = {shape = "linear", peak_lr = 1e-3, warmup_steps = 0}
"""


def test_further_phases_give_the_bits_of_a_run_that_had_them_from_the_start(here: Path, call: Call) -> None:
    """The recipe had no phases at first, and the rows of the new one are longer."""
    done(call("train", "tiny.toml"))
    recipe = Path("tiny.toml")
    recipe.write_text(recipe.read_text().replace("steps = 6\n", "", 1) + PHASES)
    ended = done(call("train", "tiny.toml"))
    assert "6 steps are done and stay as they are; then phase second (4 steps)" in ended.err
    done(call("train", "tiny.toml", "name=straight"))
    assert curve(RUN) == curve(Path("runs/straight"))
    assert final_files(RUN) == final_files(Path("runs/straight"))
    # What has not begun may still change: here nothing is left.
    refused = call("train", "tiny.toml", "train.phases.1.steps=8")
    assert refused.status == 2
    assert "add a [[train.phases]] table with `steps = 4` instead" in refused.err


def test_learned_positions_end_where_they_end(here: Path, call: Call) -> None:
    done(call("train", "tiny.toml", "model.position=learned"))
    recipe = Path("tiny.toml")
    recipe.write_text(recipe.read_text().replace("steps = 6\n", "", 1) + PHASES)
    refused = call("train", "tiny.toml", "model.position=learned")
    assert refused.status == 2
    assert "the sequences of phase second are longer than the model's 32 learned positions; shorten them" in refused.err


def test_what_cannot_continue_is_refused_with_the_remedy_and_changes_nothing(here: Path, call: Call) -> None:
    done(call("train", "tiny.toml"))

    def refused(*given: str) -> str:
        before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != ".lock"}
        ended = call("train", "tiny.toml", *given)
        assert ended.status == 2
        assert {path: path.read_bytes() for path in before} == before
        return ended.err

    assert "6 steps are done; 5 would be fewer: write `steps = 6` into the recipe" in refused("train.steps=5")
    assert "ropewalk run runs/tiny" in refused("train.steps=5")
    told = refused("train.steps=12", "train.schedule.peak_lr=1e-4")
    assert "6 steps were trained with the settings before" in told
    assert 'train.start_from = "runs/tiny"' in told
    assert "a new cycle of 1 step would follow: 2 warm-up steps exceed" in refused("train.steps=7")


def test_a_run_in_the_middle_of_its_cosine_ends_first(here: Path, call: Call, stop_at: Callable[[str], None]) -> None:
    stop_at("train.step:5")
    with pytest.raises(Killed):
        main(["train", "tiny.toml"])
    refused = call("train", "tiny.toml", "train.steps=12")
    assert refused.status == 2
    assert "the run is at step 4, and with other steps its schedule (cosine) would have been another" in refused.err
    assert "let it end with 6 steps, then continue: a new cycle follows" in refused.err


class Killed(BaseException):
    """Stands for SIGKILL: nobody catches it."""


@pytest.fixture
def stop_at() -> Iterator[Callable[[str], None]]:
    """Ends whatever runs at the labelled point that is named, once."""
    wanted: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event == "ropewalk.point" and wanted and arguments[0] == wanted[0]:
            wanted.clear()
            raise Killed

    sys.addaudithook(hook)
    yield lambda label: wanted.__setitem__(slice(None), [label])
    wanted.clear()


STOPS = {
    "constant": ["file.begin:train.json", "file.committed:config.toml", "train.step:7", "train.step:12"],
    "wsd": ["checkpoint.aside:step-00000006", "file.committed:config.toml", "train.step:6"],
    "cosine": ["file.begin:config.toml", "file.committed:config.toml", "train.step:7", "train.step:9"],
}


@pytest.mark.parametrize("shape", [pytest.param("constant", marks=pytest.mark.slow), "wsd", "cosine"])
def test_a_continuation_that_is_killed_ends_with_the_same_bits(
    shape: str, here: Path, call: Call, stop_at: Callable[[str], None]
) -> None:
    given = [f"train.schedule.shape={shape}", "train.schedule.decay_share=0.5"]
    done(call("train", "tiny.toml", *given))
    longer = ["train", "tiny.toml", *given, "train.steps=12"]
    for label in STOPS[shape]:
        stop_at(label)
        with pytest.raises(Killed):
            main(longer)
    done(call(*longer))
    restarts = ["train.schedule.restarts=[6]"] if shape == "cosine" else []
    done(call(*longer, "name=straight", *restarts))
    assert final_files(RUN) == final_files(Path("runs/straight"))
    # Losses are means since the last line, or since the process began.
    assert [(step, rate) for step, _, rate in curve(RUN)] == [(s, r) for s, _, r in curve(Path("runs/straight"))]
