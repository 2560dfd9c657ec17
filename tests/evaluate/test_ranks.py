"""Evaluation and generation under a plan: what one process measures and writes, with a rank's own parts alone."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import DamagedCheckpoint, UserError
from ropewalk.base.metric import flat_results
from ropewalk.base.progress import Silent
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.cli.main import main
from ropewalk.evaluate import from_checkpoint
from ropewalk.evaluate import sharded_model as loading
from ropewalk.evaluate.answers import ANSWERS
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.from_checkpoint import evaluate_checkpoint
from ropewalk.evaluate.generation_plan import generation_plan
from ropewalk.evaluate.results import read_results
from ropewalk.evaluate.sharded_model import evaluate_run
from ropewalk.flow import run_processes
from ropewalk.launch.worker_group import WorkerGroup
from ropewalk.model.config import Model
from ropewalk.model.decoder import build
from ropewalk.model.spec import Spec
from ropewalk.parallel.data.shard_group import ShardGroup
from ropewalk.plan.inference_plan import generation
from ropewalk.plan.plan import Plan, load_plan
from ropewalk.train.config import Phase
from ropewalk.train.settings import read_settings
from tests.flow.tiny import write_tiny
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.parallel.resident import Resident, needs_peaks
from tests.tiny import byte_tokenizer, make_run, small_spec

pytestmark = pytest.mark.xdist_group("pool")

SETTINGS = Evaluate(max_bytes=2000, samples=3, prompt_tokens=6, max_new_tokens=8)
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3, bf16": {"parallel__shard": 2, "train__precision": "bf16"},
    "tensor with sequence": {"parallel__tensor": 2, "parallel__sequence": True},
    "pipeline x ring": {"parallel__pipeline": 2, "parallel__context": 2, "plan__microbatch_size": 1},
}


def write_checkpoint(run: Path, spec: Spec, *, scale: float = 10.0) -> Path:
    """A checkpoint of random weights, large enough that predictions depend on what is read."""
    weights = {
        name: tensor.mul_(scale) if tensor.dim() == 2 else tensor
        for name, tensor in build(spec, seed=1).state_dict().items()
    }
    tokenizer = byte_tokenizer().to_str().encode()
    state = State(step=7, tokens=0, seed=3, spec=spec, data={}, model=weights, optimizer={}, tokenizer=tokenizer)
    return save(run / "checkpoints", state)


def measured(rank: int, run: Path, world: int) -> dict[str, Any]:
    """A rank's job."""
    with as_rank(rank, world):
        return evaluate_run(run)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_measures_and_samples_what_one_process_does(name: str, tmp_path: Path) -> None:
    settings = {"evaluate": SETTINGS, "train__precision": "fp32", **PLANS[name]}
    precision = settings["train__precision"]
    run = make_run(tmp_path, evaluate=SETTINGS, train__precision=precision)
    path = write_checkpoint(run, read_settings(run).model(0))
    one = evaluate_checkpoint(path, run=run, data=tmp_path / "prepared", settings=SETTINGS, seed=3, progress=Silent())
    samples = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").unlink()
    make_run(tmp_path, **settings)
    world = read_settings(run).planned.phases[0].plan.world
    one = flat_results(one)
    for results in POOL.run(measured, run, world, world=world):
        found = flat_results(results)
        assert (found["tokens"], found["documents"], found["step"]) == (one["tokens"], one["documents"], 7)
        # bf16 rounds each product at 4e-3; the sums have another order.
        close = pytest.approx(one["bits_per_byte"], rel=1e-6 if precision == "fp32" else 1e-3)
        assert found["bits_per_byte"] == close
        assert read_results(run) == results
    assert (run / "samples.jsonl").read_text() == samples


def test_a_last_phase_with_shorter_rows_is_evaluated(tmp_path: Path) -> None:
    """The model keeps the longest rows of the run, which are longer than those of the phase's plan."""
    phases = (Phase(steps=2), Phase(steps=2, sequence_length=8))
    run = make_run(tmp_path, evaluate=SETTINGS, train__steps=None, train__phases=phases)
    path = write_checkpoint(run, read_settings(run).model(1))
    found = evaluate_checkpoint(path, run=run, data=tmp_path / "prepared", settings=SETTINGS, seed=3, progress=Silent())
    assert flat_results(found)["tokens"] > 100


def test_a_checkpoint_measured_again_is_asked_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, evaluate=SETTINGS)
    path = write_checkpoint(run, read_settings(run).model(0))
    named = {"run": run, "data": tmp_path / "prepared", "settings": SETTINGS, "seed": 3, "progress": Silent()}
    first = evaluate_checkpoint(path, **named)
    monkeypatch.setattr(from_checkpoint, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    assert evaluate_checkpoint(path, **named)["tasks"] == first["tasks"]


def refused(rank: int, run: Path, world: int) -> str:
    with as_rank(rank, world), pytest.raises(DamagedCheckpoint) as caught:
        evaluate_run(run)
    return str(caught.value)


def test_all_ranks_refuse_a_checkpoint_of_which_one_finds_its_part_damaged(tmp_path: Path) -> None:
    run = make_run(tmp_path, evaluate=SETTINGS, parallel__pipeline=2, plan__microbatch_size=1)
    path = write_checkpoint(run, read_settings(run).model(0))
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1  # the last norm, which the first stage does not read
    file.write_bytes(data)
    assert all(str(path) in message for message in POOL.run(refused, run, 2, world=2))


LARGE = Model(layers=8, width=512, heads=4, mlp_width=1408)
"""26 M numbers in eight blocks: a rank's parameters are 52 MB, two blocks 26 MB, the whole is 104 MB. Of a quarter of
that, what the allocator keeps from earlier jobs would be too much."""


def held(rank: int, run: Path, world: int) -> dict[str, int]:
    """A rank's job: bytes that it takes to load the model, and the most groups that are there, or on their way, at
    once while it scores and samples."""
    load, gather = loading.load_executor, ShardGroup.start_gather
    found, executors = {"groups": 0}, []

    def load_measured(*arguments: Any, **named: Any) -> Any:
        memory = Resident()
        executors.append(load(*arguments, **named))
        found["loading"] = memory.growth()
        return executors[-1]

    def gather_counted(unit: ShardGroup) -> None:
        gather(unit)
        blocks = [each for key, each in executors[-1]._data.each[0]._units.items() if key]
        there = sum(each._gathering is not None or storage_bytes(each) > 0 for each in blocks)
        found["groups"] = max(found["groups"], there)

    with as_rank(rank, world) as patch:
        patch.setattr(loading, "load_executor", load_measured)
        patch.setattr(ShardGroup, "start_gather", gather_counted)
        evaluate_run(run)
    return found


def storage_bytes(unit: ShardGroup) -> int:
    return sum(weight.untyped_storage().nbytes() for weight in unit._weights.values())


@needs_peaks
def test_no_rank_holds_more_than_its_shard_and_two_groups_while_it_evaluates(tmp_path: Path) -> None:
    few = Evaluate(max_bytes=1000, samples=2, prompt_tokens=4, max_new_tokens=4)
    shared: dict[str, Any] = {"evaluate": few, "parallel__shard": 2}
    small = make_run(tmp_path / "small", **shared)
    write_checkpoint(small, read_settings(small).model(0))
    POOL.run(held, small, 2, world=2)  # what libraries take when they are first used
    run = make_run(tmp_path, model=LARGE, **shared)
    spec = read_settings(run).model(0)
    write_checkpoint(run, spec)
    groups = 2 * sum(4 * prod(shape) for name, shape in spec.shapes().items() if name.startswith("blocks.0."))
    for found in POOL.run(held, run, 2, world=2):
        assert found["loading"] <= 1.2 * (4 * spec.parameters() / 2 + groups)
        assert found["groups"] == 2


# The verbs.


def called(rank: int, words: list[str], folder: Path) -> tuple[int, int]:
    """A rank's job: the command line as torchrun starts it; its status, and how often this rank evaluated."""
    times, sound = [], evaluate_run
    with as_rank(rank, 2) as patch:
        patch.chdir(folder)
        patch.setattr(loading, "evaluate_run", lambda run, **named: times.append(run) or sound(run, **named))
        with pytest.raises(SystemExit) as stop:
            main(words)
        return int(stop.value.code or 0), len(times)


def test_run_and_evaluate_under_a_launcher_use_all_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path)
    words = ["tiny.toml", "parallel.shard=2", "train.precision=fp32"]
    assert POOL.run(called, ["run", *words], tmp_path, world=2) == [(0, 1), (0, 1)]
    run = tmp_path / "runs" / "tiny"
    together = flat_results(json.loads((run / "evaluation" / "results.json").read_text()))
    samples = (run / "samples.jsonl").read_text()
    shutil.rmtree(run / "evaluation")
    assert POOL.run(called, ["evaluate", *words], tmp_path, world=2) == [(0, 1), (0, 1)]
    assert flat_results(json.loads((run / "evaluation" / "results.json").read_text())) == together
    # One process, without the launcher.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "tiny.toml", "train.precision=fp32", "evaluate.max_bytes=2999", "--json"])
    assert not stop.value.code
    alone = json.loads(capsys.readouterr().out)
    assert alone["bits_per_byte"] == pytest.approx(together["bits_per_byte"], rel=1e-6)
    assert (run / "samples.jsonl").read_text() == samples

    # And with a team of its own, of which it reads the results.
    teams, results = [], (run / "evaluation" / "results.json").read_bytes()

    def measured_by(folder: Path, team: WorkerGroup, **_: Any) -> None:
        teams.append((team.processes, team.worker[-1], load_plan(folder).phases[-1].plan.replicate))
        (run / "evaluation" / "results.json").write_bytes(results)

    monkeypatch.setattr(run_processes, "run_workers", measured_by)
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "tiny.toml", "train.precision=fp32", "evaluate.max_bytes=2998", "--nproc", "2", "--json"])
    assert not stop.value.code
    assert teams == [(2, "--evaluate", 2)]
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == alone["bits_per_byte"]


@pytest.mark.slow
def test_evaluate_with_nproc_starts_as_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in (["run", "tiny.toml"], ["evaluate", "tiny.toml", "--nproc", "2", "evaluate.max_bytes=2999"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert not stop.value.code
        (tmp_path / "runs" / "tiny" / ANSWERS).unlink()  # else nothing is left to ask
    logs = tmp_path / "runs" / "tiny" / "logs"
    assert sorted(path.name for path in logs.glob("rank-*")) == ["rank-0.log", "rank-1.log"]
    assert "score" in (logs / "rank-1.log").read_text()


def test_generate_with_nproc_writes_what_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, parallel__tensor=2)
    path = write_checkpoint(run, read_settings(run).model(0))
    texts = []
    for words in ([], ["--nproc", "2"]):
        with pytest.raises(SystemExit) as stop:
            main(["generate", str(path), "--prompt", "rope walk", "--tokens", "12", "--json", *words])
        assert not stop.value.code
        texts.append(json.loads(capsys.readouterr().out)["completion"])
    assert texts[0] == texts[1] != ""
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(run), "--prompt", "rope", "--nproc", "3"])
    assert stop.value.code == 2
    assert "start 2 as in training, another multiple of 2, or one" in capsys.readouterr().err


def test_processes_use_the_plan_of_the_run_where_it_is_for_as_many(tmp_path: Path) -> None:
    run = make_run(tmp_path, parallel__pipeline=2, parallel__replicate=2, plan__microbatch_size=1)
    path = write_checkpoint(run, read_settings(run).model(0))
    same = generation_plan(path, processes=4, device="cpu")
    assert (same.pipeline, same.replicate, same.shard, same.precision) == (2, 2, 1, "fp32")
    more = generation_plan(path, processes=6, device="cpu")
    assert (more.pipeline, more.replicate, more.shard, more.zero, more.world) == (2, 1, 3, 3, 6)
    elsewhere = shutil.copytree(path, tmp_path / "imported" / path.name)
    free = generation_plan(elsewhere, processes=3, device="cpu")
    assert (free.shard, free.zero, free.world) == (3, 3, 3)
    with pytest.raises(UserError, match="5 processes cannot share this model"):
        generation_plan(list_checkpoints(run / "checkpoints")[0], processes=5, device="cpu")


def test_interleaved_stages_stay_where_they_were_trained() -> None:
    spec = small_spec(layers=4)
    plan = Plan(
        device="cpu",
        precision="bf16",
        batch_size=8,
        microbatch_size=1,
        pipeline=2,
        chunks=2,
        schedule="interleaved",
        stages=((0,), (1,), (2,), (3,)),
    )
    found = generation(plan, spec, processes=2, device="cpu")
    assert (found.stages, found.chunks, found.schedule) == (plan.stages, 2, "interleaved")
