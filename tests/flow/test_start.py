"""Training that starts from a checkpoint: grown, imported, or trained before."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch

from ropewalk import flow
from ropewalk.base.errors import ConfigError
from ropewalk.checkpoint.format import resolve_checkpoint

from .tiny import write_tiny


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained run `runs/tiny`, in whose folder we stand."""
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    flow.train("tiny.toml")
    return Path("runs/tiny")


def test_a_run_that_starts_from_a_checkpoint_has_its_weights(first: Path) -> None:
    # A rate of 1e-30 changes no float32 weight, so what is saved is what training started with.
    still = ["train.schedule.peak_lr=1e-30", "train.optimizer.weight_decay=0.0"]
    flow.train("tiny.toml", ["name=second", f"train.start_from={first}", *still])
    ours = safetensors.torch.load_file(resolve_checkpoint(Path("runs/second")) / "model.safetensors")
    theirs = safetensors.torch.load_file(resolve_checkpoint(first) / "model.safetensors")
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_training_goes_on_from_where_the_first_run_was(first: Path) -> None:
    before = flow.train("tiny.toml")["validation_loss"]
    settings = ["name=second", f"train.start_from={first}", "train.steps=30"]
    assert flow.train("tiny.toml", settings)["validation_loss"] < before


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(first: Path) -> None:
    with pytest.raises(ConfigError, match=r"`model\.layers` is 3, runs/tiny has 2"):
        flow.train("tiny.toml", ["name=second", f"train.start_from={first}", "model.layers=3"])


def test_a_missing_start_is_found_before_anything_runs(first: Path) -> None:
    with pytest.raises(ConfigError, match=r"`train\.start_from`: runs/nowhere: no such folder"):
        flow.check(Path("tiny.toml"), ["train.start_from=runs/nowhere"])
