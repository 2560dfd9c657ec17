"""`ropewalk chaos` passes on a sound run, fails where something is wrong, and touches nothing but its own copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.base.seal import sealed_toml
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.flow.chaos_trials import trials as module
from ropewalk.flow.chaos_trials.trials import Laboratory, flip
from tests.cli.conftest import Call, call, tiny  # noqa: F401 - fixtures

STEPS = "train.steps=12"
SOME = ("kill at checkpoint.manifest", "disk full", "flipped bit in model")


def only(some: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves these trials alone: each trains a run."""
    every = module._trials

    def few(*arguments, **settings):
        return (trial for trial in every(*arguments, **settings) if trial[0].startswith(some))

    monkeypatch.setattr(module, "_trials", few)


def test_a_sound_run_passes_and_nothing_is_left(
    tiny: Path,  # noqa: F811
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(SOME, monkeypatch)
    ended = call("chaos", "tiny.toml", STEPS, "--quick", "--json")
    result = json.loads(ended.out)
    assert ended.status == 0, result
    assert [trial["passed"] for trial in result["trials"]] == [True] * len(SOME)
    assert result["failed"] == []
    assert not list((tiny / "runs").iterdir())


def test_a_trial_that_ends_otherwise_fails_by_name_and_its_copy_stays(
    tiny: Path,  # noqa: F811
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(laboratory: Laboratory, run: Path) -> None:
        """What a run that loses its checkpoint and begins with other data would leave."""
        laboratory.copy("halfway", run.name)
        for path in list_checkpoints(run / "checkpoints"):
            flip(path / "model.safetensors", 0.9, 1)

    def lose(laboratory: Laboratory, run: Path) -> None:
        laboratory.copy("halfway", run.name)
        config = run / "config.toml"
        assert config.exists(), sorted(path.name for path in run.iterdir())
        text = config.read_text().replace("peak_lr = 0.003", "peak_lr = 0.004")
        config.write_bytes(sealed_toml(text.partition("# seal: ")[0]))

    monkeypatch.setattr(module, "_trials", lambda *_, **__: [("spoilt", spoil), ("other weights", lose)])
    ended = call("chaos", "tiny.toml", STEPS)
    assert ended.status == 2
    assert "spoilt         FAILED: " in ended.out
    assert "model.safetensors: damaged checkpoint" in ended.out
    assert "not the bits of the undisturbed run" in ended.out
    assert len(list((tiny / "runs" / "tiny.chaos").glob("failed-*"))) == 2


def test_a_run_too_short_to_strike_is_refused(tiny: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match=r"^2 steps are too few .* raise `train.steps` to 4 or more"):
        flow.chaos("tiny.toml", ["train.steps=2"])
    assert not (tiny / "prepared").exists(), "refused before anything is prepared"


def test_a_run_that_stops_before_it_can_be_struck_is_refused(tiny: Path) -> None:  # noqa: F811
    never = ["train.early_stop.patience=1", "train.early_stop.min_delta=100.0", "train.validate_every_steps=1"]
    with pytest.raises(UserError, match=r"stopped early, after [123] checkpoints.*leave `train.early_stop` out"):
        flow.chaos("tiny.toml", [STEPS, *never])


@pytest.mark.slow
def test_every_trial_passes(tiny: Path) -> None:  # noqa: F811
    result = flow.chaos("tiny.toml", [STEPS])
    assert result["failed"] == [], result
    assert len(result["trials"]) > 80


def test_a_folder_that_chaos_did_not_make_is_not_removed(tmp_path: Path) -> None:
    own = tmp_path / "tiny.chaos"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"tiny.chaos: not made by `ropewalk chaos`"):
        module.clear(own)
    assert (own / "notes.txt").read_text() == "mine"
    for _ in range(2):
        module.clear(tmp_path / "other.chaos")
    assert [path.name for path in (tmp_path / "other.chaos").iterdir()] == [module.MARK]
