"""A user's hook in one file beside the recipe, and hooks given in Python: called, and obeyed when they ask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ropewalk import flow
from ropewalk.base.errors import ConfigError, UserError
from ropewalk.base.events import read_events
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.cli.main import main
from ropewalk.train.hooks import Hook
from tests.flow.tiny import write_tiny

OURS = Path(__file__).with_name("watch.py")
RUN = Path("runs/tiny")
SEEN = [
    *(["begin", 0], 1, 2, ["loss", 2, True], 3, ["validation", 3]),
    *(4, ["loss", 4, True], ["rollback", 3, "step 4 looks odd"], 4, ["loss", 4, True], 5),
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that names the hook, which lies beside it; the working folder is another one."""
    assert len(OURS.read_text().splitlines()) < 60
    folder = tmp_path / "recipes"
    folder.mkdir()
    made = write_tiny(tmp_path)
    shutil.copy(OURS, folder)
    path = folder / "tiny.toml"
    path.write_text(made.read_text().replace("[train]", '[train]\nhooks = ["watch:Watch"]'))
    monkeypatch.chdir(tmp_path)
    return path


def seen(rank: int) -> Any:
    return json.loads((RUN / f"watch-{rank}.json").read_text())


def kinds(run: Path = RUN) -> list[str]:
    return [event["kind"] for event in read_events(run / "events.jsonl")]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


def test_a_hook_that_a_recipe_names_sees_the_run_and_saves_rolls_back_and_stops_it(recipe: Path) -> None:
    assert call("run", str(recipe), "checkpoint.save_every_steps=100") == 0
    assert seen(0) == SEEN
    assert [path.name for path in list_checkpoints(RUN / "checkpoints")] == ["step-00000003", "step-00000005"]
    assert kinds().count("rolled_back") == 1
    # The run is trained as far as the hook let it: the same command has nothing to do, and the model was evaluated.
    summary = json.loads((RUN / "summary.json").read_text())
    assert summary["steps"] == 5
    assert call("run", str(recipe), "checkpoint.save_every_steps=100") == 0
    assert kinds().count("train_started") == 1


def test_the_gradients_that_a_hook_changes_are_those_of_the_update(recipe: Path) -> None:
    changed = flow.train(recipe, ["name=changed", "train.clip_norm=0.1"])
    source = recipe.with_name("watch.py")
    source.write_text(OURS.read_text().replace(".mul_(2)", ".mul_(1)"))
    same = flow.train(recipe, ["name=same", "train.clip_norm=0.1"])
    assert changed["step"] == same["step"] == 5
    assert changed["train_loss"] != same["train_loss"]


def test_every_worker_process_finds_the_hook_beside_the_recipe(recipe: Path) -> None:
    assert call("train", str(recipe), "parallel.replicate=2", "plan.microbatch_size=1", "--nproc", "2") == 0
    # A rollback comes before the save of step 4; other requests reach all ranks one step later.
    assert seen(0) == seen(1)
    assert ["rollback", 2, "step 4 looks odd"] in seen(0)
    assert seen(0).count(6) == 1


class Steps(Hook):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.steps.append(run.step)


def test_hooks_are_given_in_python(recipe: Path) -> None:
    steps = Steps()
    flow.train(recipe, ["train.hooks=[]"], hooks=[steps])
    assert steps.steps == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match=r"name the hooks in `train\.hooks`"):
        flow.train(recipe, ["name=two", "train.hooks=[]", "parallel.replicate=2"], nproc=2, hooks=[steps])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("watch:Wach", r"watch\.py` has no `Wach`"),
        ("watch:function", r'`train\.hooks`: "watch:function" is no hook; derive the class'),
        ("watch:Needy", r'`train\.hooks`: "watch:Needy" cannot be made: missing a required argument'),
        ("misnamed:Watch", r'"misnamed:Watch" defines `after_stp`, .* did you mean `after_step`\?'),
        ("short:Watch", r"write `def after_step\(self, run, result\)`"),
        ("wach:Watch", "no module `wach`"),
    ],
)
def test_what_is_wrong_with_a_hook_is_said_before_anything_is_prepared(recipe: Path, name: str, what: str) -> None:
    source = OURS.read_text()
    (recipe.parent / "misnamed.py").write_text(source.replace("after_step", "after_stp"))
    (recipe.parent / "short.py").write_text(source.replace("(self, run, result)", "(self, run)"))
    with pytest.raises(ConfigError, match=what):
        flow.train(recipe, [f'train.hooks=["{name}"]'])
    assert not Path("prepared").exists()
