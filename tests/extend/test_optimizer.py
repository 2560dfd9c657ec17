"""A user's optimizer and LR schedule in files beside the recipe: trained, sharded, continued and refused like ours."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.cli.main import main
from ropewalk.config.resolved import load_resolved
from ropewalk.flow.recipe import Recipe
from tests.flow.tiny import write_tiny

HERE = Path(__file__).parent
LARS = ["train.optimizer.kind=lars:Lars", "train.optimizer.settings.momentum=0.8"]
SAWTOOTH = ["train.schedule.shape=sawtooth:Sawtooth", "train.schedule.settings.period=3"]
TWO = ["--nproc", "2"]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line in an empty folder; the recipe and the user's files lie in `given`."""
    recipe = write_tiny(tmp_path / "given")
    recipe.write_text(recipe.read_text().replace('"corpus/', '"given/corpus/'))
    for name in ("lars.py", "sawtooth.py"):
        assert len((HERE / name).read_text().splitlines()) < 60
        shutil.copy(HERE / name, recipe.parent)
    monkeypatch.chdir(tmp_path)

    def called(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        return int(stop.value.code or 0), *capsys.readouterr()

    return called


def trained(call: Call, name: str, *words: str) -> list[float]:
    status, _, err = call("train", "given/tiny.toml", f"name={name}", *words)
    assert status == 0, err
    return steps(name, "loss")


def steps(run: str, key: str) -> list[float]:
    events = (json.loads(line) for line in Path("runs", run, "events.jsonl").read_text().splitlines())
    return [event[key] for event in events if event["kind"] == "step"]


def newest(run: str) -> dict[str, bytes]:
    """The tensors of the newest checkpoint, by file."""
    folder = list_checkpoints(Path("runs", run, "checkpoints"))[-1]
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix == ".safetensors"}
    assert files, list(folder.iterdir())
    return files


def test_an_optimizer_of_a_user_trains_alone_with_zero_3_and_on_tensor_ranks(call: Call) -> None:
    alone = trained(call, "alone", *LARS)
    assert alone != trained(call, "adamw")
    for name, parallel in (
        ("zero", ["parallel.shard=2", "parallel.zero=3"]),
        ("tensor", ["parallel.tensor=2", "parallel.sequence=true"]),
    ):
        assert trained(call, name, *LARS, *parallel, *TWO) == pytest.approx(alone, rel=1e-5)
    saved = load_resolved(Path("runs/alone"), Recipe)
    assert saved.value.train.optimizer.settings.momentum == 0.8
    assert saved.origin("train.optimizer.settings.momentum") == f"command line: {LARS[1]}"
    plans = [json.loads(Path("runs", name, "plan.json").read_text())["phases"][0] for name in ("alone", "adamw")]
    state = [plan["memory"]["optimizer"] for plan in plans]
    assert 2 * state[0] == state[1]


def test_a_run_with_an_optimizer_of_a_user_continues_and_ends_the_same(call: Call) -> None:
    straight = trained(call, "straight", *LARS, *SAWTOOTH)
    trained(call, "stopped", *LARS, *SAWTOOTH, "train.steps=4")
    assert trained(call, "stopped", *LARS, *SAWTOOTH) == straight
    assert newest("stopped") == newest("straight")
    source = Path("given/lars.py")
    before = source.read_text()
    source.write_text(before.replace("+ decay * weight", "- decay * weight"))
    status, _, err = call("train", "given/tiny.toml", "name=stopped", *LARS, *SAWTOOTH, "train.steps=8")
    assert (status, "plugins.lars: " in err) == (2, True)
    source.write_text(before.replace("momentum: A", "decay: A").replace("self.momentum", "self.decay"))
    renamed = [word.replace("settings.momentum", "settings.decay") for word in LARS]
    status, _, err = call("train", "given/tiny.toml", "name=stopped", *renamed, *SAWTOOTH, "train.steps=8")
    assert (status, "plugins.lars: " in err) == (2, True)
    source.unlink()
    status, _, err = call("train", "given/tiny.toml", "name=stopped", *LARS, *SAWTOOTH, "train.steps=8")
    assert (status, "no module `lars`" in err) == (2, True)


def test_a_schedule_of_a_user_sets_the_rate(call: Call) -> None:
    own = [*SAWTOOTH, "train.schedule.peak_lr=0.01", "train.schedule.warmup_steps=0", "train.log_every_steps=1"]
    trained(call, "sawtooth", *own)
    assert steps("sawtooth", "lr") == pytest.approx([0.01, 0.007, 0.004] * 2)
    trained(call, "halves", "train.schedule.shape=sawtooth:halves", *own[2:])
    assert steps("halves", "lr") == pytest.approx([0.01] * 3 + [0.005] * 3)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.optimizer.kind=adamx"], 'no optimizer "adamx"; did you mean "adamw"?'),
        (["train.optimizer.kind=nowhere:Lars"], "no module `nowhere`; there is no nowhere.py in "),
        (["train.optimizer.kind=lars:Larse"], "has no `Larse`; it defines Lars"),
        ([LARS[0], "train.optimizer.settings.momentun=0.5"], "did you mean `momentum`?"),
        ([LARS[0], "train.optimizer.settings.momentum=1.5"], "it must be at least 0 and below 1"),
        (["train.optimizer.settings.momentum=0.5"], '"adamw" has no settings table'),
        (["train.schedule.shape=broken:Shape"], "importing `broken` failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(call: Call, words: list[str], line: str) -> None:
    Path("given/broken.py").write_text("1 / 0\n")
    status, _, err = call("recipe", "check", "given/tiny.toml", *words)
    assert (status, line in err, len(err.strip().splitlines())) == (2, True, 1), err


KIND = """
from dataclasses import dataclass

from ropewalk.train.optim.table import OptimizerKind


@dataclass(frozen=True, kw_only=True)
class Settings:
    momentum: float = 0.9


LARS = OptimizerKind(target="lars_rule:Rule", settings=Settings)
"""
RULE = """
from lars import Lars


class Rule(Lars):
    def __init__(self, settings):
        super().__init__(momentum=settings.momentum)
"""


def test_an_entry_with_a_lazy_target_keeps_torch_out_of_checks(call: Call) -> None:
    Path("given/lars_kind.py").write_text(KIND)
    Path("given/lars_rule.py").write_text(RULE)
    lazy = [word.replace("lars:Lars", "lars_kind:LARS") for word in LARS]
    status, _, err = call("recipe", "check", "given/tiny.toml", *lazy)
    assert (status, "lars_rule" in sys.modules) == (0, False), err
    assert trained(call, "lazy", *lazy) == trained(call, "eager", *LARS)


@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        ("train.optimizer.kind=empty:Empty", "no optimizer: it has no `begin` and no `update`"),
        ("train.schedule.shape=empty:Empty", "no LR schedule: it has no `share`"),
        ("model.kind=empty:Empty", "no model kind: it has no `components`"),
    ],
)
def test_a_class_without_its_methods_is_refused_before_training(call: Call, setting: str, missing: str) -> None:
    Path("empty.py").write_text("class Empty:\n    pass\n")
    status, _, err = call("recipe", "check", "given/tiny.toml", setting)
    assert status == 2
    assert f"`empty:Empty` is {missing}; define it" in err
