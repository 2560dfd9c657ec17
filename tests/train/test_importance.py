"""Training on sequences that are drawn by their loss, from the recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.base.errors import ConfigError
from ropewalk.checkpoint.read.load import load
from ropewalk.config.read import parse
from ropewalk.flow.recipe import Recipe
from ropewalk.load.batch import Batch
from ropewalk.load.config import ImportanceSampling, Load
from ropewalk.load.loader import Loader
from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Phase, Train
from ropewalk.train.loop import train
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.tiny import make_run, write_corpus
from tests.train.runs import events, final_files, last_checkpoint, quick, train_until

SMALL = ImportanceSampling(memory_bytes=2000, package_bytes=400, package_memory_bytes=400, draws=16)
"""Epochs of 4 steps; a tenth or so of the sequences are held."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def run_of(folder: Path, settings: ImportanceSampling = SMALL, **overrides: Any) -> Path:
    return make_run(folder, load__importance=settings, train__steps=12, **overrides)


def sampler_of(run: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint remembers of the sampler."""
    state = load(last_checkpoint(run))
    return {name.split("/")[1]: t for name, t in state.optimizer.items() if name.startswith("sampler/")}


def test_the_losses_that_the_sampler_knows_are_those_of_the_sequences(tmp_path: Path) -> None:
    # Weights that hardly move: the losses of all steps are those of the last weights.
    run = run_of(tmp_path, train__schedule__peak_lr=1e-12)
    train(run)
    losses = sampler_of(run)["losses"].numpy()
    seen = np.flatnonzero(~np.isnan(losses))
    assert 16 < len(seen) <= 48
    loader = Loader(tmp_path / "prepared", sequence_length=16, batch_size=4, seed=3, importance=SMALL)
    buffer = np.empty((len(seen), loader._form.row_bytes), np.uint8)
    loader._gather_samples(seen, buffer)
    loader.close()
    state = load(last_checkpoint(run))
    model = build(state.spec, seed=0)
    model.load_state_dict(dict(state.model))
    plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=4, sequence_length=16)
    batch = Batch.of_rows(torch.from_numpy(np.ascontiguousarray(buffer[:, : 17 * 2]).view(np.uint16).astype(np.int64)))
    expected = -apply(plan, model, None, None).score(batch).log_probabilities.mean(1)
    np.testing.assert_allclose(losses[seen], expected.numpy(), rtol=1e-4)


def test_sequences_of_high_loss_are_held_and_drawn_more_often(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, draws=0, memory_bytes=4000)
    run = make_run(tmp_path, load__importance=settings, train__steps=82)
    train(run)
    first, second = events(run, "importance")
    assert first["distinct"] == first["draws"], "nothing is known yet: each sequence once"
    assert second["distinct"] < second["draws"]
    assert second["largest_weight"] <= 1 / SMALL.floor
    found = sampler_of(run)
    weights, given, high = (found[name].numpy() for name in ("weights", "given", "high"))
    held = high[given].astype(bool)
    assert weights[held].mean() < weights[~held].mean()
    # Estimates of 1: the expected weight of a draw.
    assert weights.mean() == pytest.approx(1.0, abs=0.1)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stop", [pytest.param(3, marks=SLOW), 5, pytest.param(8, marks=SLOW), 10])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    runs = [run_of(tmp_path / name, checkpoint__save_every_steps=1) for name in ("straight", "stopped")]
    train(runs[0])
    train_until(runs[1], stop)
    train(runs[1])
    assert final_files(runs[0]) == final_files(runs[1])


def test_the_hit_rate_is_told_next_to_that_of_uniform_reading(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    train(run)
    (told,) = [event["importance"] for event in events(run, "load_cached")]
    assert told["hits"] == max(0, told["asked"] - told["random_reads"] - told["sequential_reads"])
    assert told["asked"] >= 48
    assert 0 <= told["hit_rate"] < 1
    assert 0 < told["uniform_hit_rate"] < 1
    assert all(0 <= event["importance_hit_rate"] <= 1 for event in events(run, "step"))
    assert list((run / "packages" / "rank-0").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        pytest.param({"memory_bytes": 200}, "high", marks=SLOW),
        ({"floor": 1.0}, "weights"),
        pytest.param({"package_bytes": 1600}, "package_of", marks=SLOW),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_every_setting_reaches_the_sampler(tmp_path: Path, change: dict[str, Any], differs: str) -> None:
    found = []
    for name, settings in (("as-it-was", SMALL), ("changed", dataclasses.replace(SMALL, **change))):
        run = make_run(tmp_path / name, load__importance=settings, train__steps=8)
        train(run)
        found.append(sampler_of(run)[differs])
    before, after = found
    assert not torch.equal(before.nan_to_num(-1), after.nan_to_num(-1))


@pytest.mark.parametrize("smoothing", [0.0, 0.9])
def test_the_smoothing_of_the_recipe_is_that_of_the_sampler(tmp_path: Path, smoothing: float) -> None:
    settings = dataclasses.replace(SMALL, smoothing=smoothing)
    loader = Loader(write_corpus(tmp_path / "prepared"), sequence_length=16, batch_size=4, seed=3, importance=settings)
    loader.close()
    assert loader.sampler
    for loss in (4.0, 8.0):
        loader.sampler.importance.update(np.array([5]), np.array([loss]))
    assert loader.sampler.importance.values()[5] == pytest.approx(smoothing * 4 + (1 - smoothing) * 8)


def test_readers_of_one_order_read_what_one_alone_reads(tmp_path: Path) -> None:
    write_corpus(tmp_path / "prepared")
    losses = np.random.default_rng(0).lognormal(sigma=1.0, size=1000)

    def loader(rank: int, world: int) -> Loader:
        arguments = {"sequence_length": 16, "batch_size": 4, "seed": 3, "importance": SMALL}
        return Loader(tmp_path / "prepared", rank=rank, world=world, packages=tmp_path / f"{world}", **arguments)  # type: ignore[arg-type]

    def read(readers: list[Loader]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for _ in range(12):
            parts = [reader.next() for reader in readers]
            tokens, weight = (
                torch.stack([getattr(p, n) for p in parts], 1).flatten(0, 1) for n in ("tokens", "weight")
            )
            found.append((tokens, weight))
            for reader in readers:
                samples = reader.sampler.samples_of(reader.last_read.start, 4)  # type: ignore[union-attr]
                reader.sampler.importance.update(samples, losses[samples])  # type: ignore[union-attr]
        for reader in readers:
            reader.close()
        return found

    alone = read([loader(0, 1)])
    for one, two in zip(alone, read([loader(0, 2), loader(1, 2)]), strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])
    # In the first epoch each sequence is as likely as any other; from then on weights make up for what is not.
    weights = [torch.unique(weight) for _, weight in alone]
    assert all(torch.equal(found, torch.ones(1)) for found in weights[:4])
    assert len(torch.cat(weights[4:]).unique()) > 2


def test_runs_that_share_a_folder_hold_what_is_important_to_all_of_them(tmp_path: Path) -> None:
    shared = dataclasses.replace(SMALL, shared=str(tmp_path / "shared"))
    other = run_of(tmp_path / "other", dataclasses.replace(shared, job=1), seed=4, train__seed=9)
    train(other)
    assert (tmp_path / "shared" / "importance-1.bin").exists()
    runs = [run_of(tmp_path / "alone"), run_of(tmp_path / "sharing", shared)]
    for run in runs:
        train(run)
    alone, sharing = (sampler_of(run) for run in runs)
    assert not torch.equal(alone["high"], sharing["high"])
    assert (tmp_path / "shared" / "importance-0.bin").exists()


def test_whole_documents_are_drawn_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, load__packing="best-fit")
    train(run)
    tokens = [event["tokens_per_s"] * event["step_s"] for event in events(run, "step")]
    assert any(count < 4 * 16 for count in tokens), "places without a token are not trained"


TEXT = """
name = "a"
[[prepare.sources]]
name = "x"
paths = ["x"]
[load.importance]
"""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('[[train.mixture]]\nsource = "x"', "train.mixture.*remove the mixture"),
        ("[train.batch_ramp]\nfrom_size = 1\nover_steps = 4", "train.batch_ramp.*remove the ramp"),
        ("[train.length_ramp]\nfrom_length = 128\nover_steps = 4", "train.length_ramp.*remove the ramp"),
        ('[load]\nshuffle = "blocks"', 'load.shuffle.*set `shuffle = "all"'),
        ('[load.cache]\nstaging = "s"\njobs = 2', "load.cache.staging.*remove one of the two"),
        ("job = 1", "load.importance.job.*no folder is shared"),
    ],
)
def test_what_cannot_be_drawn_by_importance_is_refused_before_any_work(more: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        parse(Recipe, TEXT + more, "recipe.toml")


def test_a_recipe_without_the_table_draws_nothing(tmp_path: Path) -> None:
    assert Load().importance is None
    run = make_run(tmp_path)
    train(run)
    assert events(run, "importance") == []
    assert not (run / "packages").exists()


def trained_rank(rank: int, run: Path, world: int) -> float:
    """A rank's job: trains; its last loss."""
    with as_rank(rank, world):
        return train(run)["train_loss"]


@pytest.mark.slow
@pytest.mark.xdist_group("pool")
def test_two_ranks_draw_what_one_draws(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one")
    alone = train(one)
    two = run_of(tmp_path / "two", parallel__replicate=2, plan__microbatch_size=1)
    losses = POOL.run(trained_rank, two, 2, world=2)
    assert losses == [pytest.approx(alone["train_loss"], rel=1e-4)] * 2
    left, right = sampler_of(one), sampler_of(two)
    assert torch.equal(left["given"], right["given"])
    torch.testing.assert_close(left["losses"], right["losses"], rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.slow
def test_each_phase_begins_with_no_loss_known_and_goes_on_from_a_stop(tmp_path: Path) -> None:
    phases = (Phase(steps=6), Phase(steps=6))
    more: dict[str, Any] = {"load__importance": SMALL, "train__steps": Train().steps, "train__phases": phases}
    runs = [make_run(tmp_path / name, **more) for name in ("straight", "stopped")]
    train(runs[0])
    train_until(runs[1], 9)
    train(runs[1])
    assert final_files(runs[0]) == final_files(runs[1])
    assert [event["epoch"] for event in events(runs[0], "importance")] == [0, 1, 0, 1]
