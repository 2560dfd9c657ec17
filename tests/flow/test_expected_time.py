"""The time that a plan is expected to take: proportional to the work, corrected by runs of the same machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.seal import sealed_json
from ropewalk.flow.expected_time import UNTRIED, ExpectedTime, expected_time
from ropewalk.flow.plan_recipe import plan_recipe
from ropewalk.flow.run_or_recipe import resolve_recipe
from ropewalk.plan.machine import Gpu, Machine, this_machine
from ropewalk.plan.speed import Speed
from tests.flow.tiny import write_tiny

SPEED = Speed(device="cpu", flops=50e9, words="two cores, 25 GFLOP/s a core measured")
CORES = Machine(processor="test", cores=2, memory_bytes=1 << 33, bf16=False, gpus=())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny recipe and its finished run."""
    folder = tmp_path_factory.mktemp("finished")
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flow.run("tiny.toml", until="report")
    return folder


def times(folder: Path, *settings: str, runs: str = "runs", machine: Machine | None = None) -> ExpectedTime:
    recipe = resolve_recipe(folder / "tiny.toml", settings).value
    planned = plan_recipe(recipe, vocabulary=300, machine=machine or CORES)
    return expected_time(planned, machine or CORES, runs=folder / runs, speed=SPEED)


def test_without_runs_the_time_is_the_work_over_the_speed_and_the_interval_is_wide(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    large = ("model.width=512", "model.heads=8", "load.sequence_length=256")
    once, twice = times(tmp_path, *large), times(tmp_path, *large, "train.steps=12")
    assert (twice.low_s, twice.high_s) == (pytest.approx(2 * once.low_s), pytest.approx(2 * once.high_s))
    assert once.high_s / once.low_s == pytest.approx(UNTRIED[1] / UNTRIED[0])
    spec = (
        plan_recipe(resolve_recipe(tmp_path / "tiny.toml", large).value, vocabulary=300, machine=CORES).phases[0].spec
    )
    estimate = 6 * 4 * 256 / SPEED.tokens_per_s(spec, batch_tokens=1024)
    assert once.low_s < estimate < once.high_s
    assert once.basis.startswith("on an idle machine; two cores, 25 GFLOP/s a core measured; earlier models")


def test_a_step_of_few_tokens_takes_as_long_as_its_layers_at_least(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    few, many = times(tmp_path, "model.layers=2"), times(tmp_path, "model.layers=8")
    assert few.low_s > 6 * 2 * 2 * 1.5e-3 / UNTRIED[1]
    assert many.low_s > 2 * few.low_s


def test_gpus_share_the_work(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    gpu = Gpu(name="NVIDIA H200", memory_bytes=140 << 30, capability=9.0)
    machine = Machine(processor="test", cores=16, memory_bytes=1 << 37, bf16=True, gpus=(gpu, gpu))
    large = ("model.width=4096", "model.layers=8", "model.heads=32", "load.sequence_length=1024", "train.batch_size=16")
    recipes = [
        resolve_recipe(tmp_path / "tiny.toml", [*large, f"parallel.replicate={ranks}"]).value for ranks in (1, 2)
    ]
    one, two = (
        expected_time(plan_recipe(recipe, vocabulary=300, machine=machine), machine, runs=tmp_path / "none")
        for recipe in recipes
    )
    assert one.low_s == pytest.approx(2 * two.low_s)
    assert "989 TFLOP/s by its data sheet" in one.basis


def test_a_run_of_the_same_model_here_is_what_is_expected(finished: Path) -> None:
    summary = json.loads((finished / "runs/tiny/summary.json").read_text())
    expected = times(finished, machine=this_machine())
    assert expected.low_s < summary["seconds"]["train"] < expected.high_s
    assert expected.basis.startswith(f"1 run of this model on this machine, e.g. {finished}/runs/tiny; two cores")
    longer = times(finished, "train.steps=600", machine=this_machine())
    assert longer.low_s == pytest.approx(100 * expected.low_s)


def test_a_run_of_another_model_corrects_the_estimate(finished: Path, tmp_path: Path) -> None:
    other = times(finished, "model.layers=8", machine=this_machine())
    alone = times(finished, "model.layers=8", machine=this_machine(), runs="none")
    assert "1 run of other models on this machine" in other.basis
    same = times(finished, machine=this_machine())
    alike = times(finished, machine=this_machine(), runs="none")
    assert other.low_s / alone.low_s == pytest.approx(same.low_s / alike.low_s)


def test_runs_of_other_machines_and_damaged_ones_say_nothing(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    folder = tmp_path / "copy"
    assert "idle machine" in times(folder).basis, "the machine of this test has another name"
    path = folder / "runs/tiny/summary.json"
    assert "idle machine" not in times(folder, machine=this_machine()).basis
    plan = folder / "runs/tiny/plan.json"
    tree = {key: value for key, value in json.loads(plan.read_text()).items() if key != "seal"}
    spec = tree["phases"][0]["spec"]
    for own in ({"norm": "gone:Norm"}, {"norm": "gone:Norm", "norm_settings": {"epsilon": 1e-3}}):
        plan.write_bytes(sealed_json({**tree, "phases": [{**tree["phases"][0], "spec": {**spec, **own}}]}))
        assert "idle machine" in times(folder, machine=this_machine()).basis
    plan.write_bytes(sealed_json(tree))
    assert "idle machine" not in times(folder, machine=this_machine()).basis
    path.write_text(path.read_text().replace('"tokens_per_s": ', '"tokens_per_s": 9'))
    assert "idle machine" in times(folder, machine=this_machine()).basis
    path.write_text("{")
    assert "idle machine" in times(folder, machine=this_machine()).basis
    path.unlink()
    os.mkfifo(path)
    assert "idle machine" in times(folder, machine=this_machine()).basis


def test_a_measured_speed_is_kept_for_this_machine_and_a_damaged_one_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tiny(tmp_path)

    def basis(machine: Machine) -> str:
        planned = plan_recipe(resolve_recipe(tmp_path / "tiny.toml").value, vocabulary=300, machine=machine)
        return expected_time(planned, machine, runs=tmp_path / "none").basis

    here = basis(CORES)
    (file,) = (tmp_path / "cache/ropewalk").iterdir()
    kept = json.loads(file.read_text())
    del kept["seal"]
    file.write_bytes(sealed_json({**kept, "speed": {**kept["speed"], "words": "as it was"}}))
    assert "as it was" in basis(CORES)
    file.write_bytes(file.read_bytes().replace(b"as it was", b"as it wAs"))
    assert "as it" not in basis(CORES)
    assert "speed.json: this speed is damaged" in caplog.text
    assert "this machine is measured again" in caplog.text
    other = basis(dataclasses.replace(CORES, processor="other"))
    assert "other, 2 cores" in other
    assert "as it was" not in here + other
    file.write_text("{")
    assert "test, 2 cores" in basis(CORES)


def test_plan_states_the_time_with_its_reasons(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    told = flow.plan("tiny.toml", speed=SPEED)["time"]
    assert 0 < told["low_s"] < told["high_s"]
    assert told["basis"].startswith("1 run of this model")
    measured = flow.plan("tiny.toml", runs=Path("none"))["time"]
    assert "measured" in measured["basis"] or "data sheet" in measured["basis"]
