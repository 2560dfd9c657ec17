"""`train --verify` finds every plan equal to one device, and names what differs where something is wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.cli.main import main
from ropewalk.cli.run_results import verdict_text
from ropewalk.model.config import Lora, Model
from ropewalk.model.decoder import build
from ropewalk.parallel import executor, microbatch, state
from ropewalk.parallel.comm import Group, Pending
from ropewalk.parallel.data import replicas
from ropewalk.plan.layout import problems
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Phase
from ropewalk.train.equality_check import SHORT, Outcome, Trial, backward_by_rows, make_trial, run_plainly, trial_plan
from ropewalk.train.optim.table import OPTIMIZERS
from ropewalk.train.reduced import candidates
from ropewalk.train.settings import VERDICT, Settings, read_settings
from ropewalk.train.verify import LIMITS, _memory_of, verify
from tests.launch.elastic import train as train_by_command
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.tiny import make_run, small_spec

pytestmark = pytest.mark.xdist_group("pool")

Verdict = dict[str, Any]

# What may be wrong: each is the smallest change that a wrong line of code would be.


def dropped_sum(patch: pytest.MonkeyPatch) -> None:
    """Gradients of the replicas are not added up."""
    sound = Group.start_all_reduce

    def start(group: Group, x: Tensor, *, operation: Any = "sum") -> Pending:
        return Pending((), x) if group.name == "replicate+context" else sound(group, x, operation=operation)

    patch.setattr(Group, "start_all_reduce", start)


def forgotten_bucket(patch: pytest.MonkeyPatch) -> None:
    """One gradient never travels."""
    sound = replicas.Replicas._start

    def start(these: replicas.Replicas, bucket: Any) -> None:
        if LOST not in bucket.parameters:
            sound(these, bucket)

    patch.setattr(replicas.Replicas, "_start", start)


def wrong_place(patch: pytest.MonkeyPatch) -> None:
    """The ring takes its neighbour's places for its own."""
    sound = microbatch.positions_of

    def places(length: int, group: Group, kind: Any) -> Tensor:
        return sound(length, Group(group.name, group.ranks, group.ranks[group.rank - 1], None), kind)

    patch.setattr(microbatch, "positions_of", places)


def stale_rank(patch: pytest.MonkeyPatch) -> None:
    """The second rank's last norm does not move."""
    sound = state.RankState.update

    def update(held: Any, *arguments: Any, **named: Any) -> None:
        kept = held.parameters["norm.weight"].detach().clone()
        sound(held, *arguments, **named)
        if held._mesh.rank == 1:
            held.parameters["norm.weight"].data.copy_(kept)

    patch.setattr(state.RankState, "update", update)


def wrong_norm(patch: pytest.MonkeyPatch) -> None:
    """Only the figure is wrong: nothing is clipped by it."""
    sound = executor.global_norm

    def norm(*arguments: Any, **named: Any) -> Any:
        loss, found = sound(*arguments, **named)
        return loss, found * (1 + 1e-9)

    patch.setattr(executor, "global_norm", norm)


LOST = "blocks.1.attention.out.weight"
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each for each in (dropped_sum, forgotten_bucket, wrong_place, stale_rank, wrong_norm)
}


def verified(number: int, run: Path, world: int, fault: str = "") -> Verdict:
    """A rank's job."""
    with as_rank(number, world) as patch:
        if fault:
            FAULTS[fault](patch)
        return verify(run)


def in_pool(run: Path, fault: str = "") -> Verdict:
    """The verdict of all ranks, who must agree."""
    world = read_settings(run).planned.phases[0].plan.world
    verdicts = POOL.run(verified, run, world, fault, world=world)
    assert all({**each, "seconds": 0} == {**verdicts[0], "seconds": 0} for each in verdicts)
    assert json.loads((run / VERDICT).read_text()) == verdicts[0]
    return verdicts[0]


PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"parallel__replicate": 2, "parallel__gradient_compression": "bf16"},
    "ZeRO-3": {"parallel__shard": 2, "train__precision": "bf16"},
    "tensor": {"parallel__tensor": 2, "model__dropout": 0.1},
    "ulysses": {"parallel__context": 2, "parallel__context_method": "ulysses"},
    "pipeline": {"parallel__pipeline": 2, "plan__microbatch_size": 1},
    "exact": {"parallel__replicate": 2, "parallel__exact": True, "train__optimizer__kind": "muon"},
    "balance": {"parallel__replicate": 2, "parallel__balance": True, "model__dropout": 0.1},
    "8-bit": {"parallel__tensor": 2, "parallel__saved_activations": "8-bit", "model__dropout": 0.1},
    "adapters on 4": {"parallel__tensor": 2, "parallel__context": 2, "train__lora": Lora(rank=2)},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_is_right_is_equal(name: str, tmp_path: Path) -> None:
    verdict = in_pool(make_run(tmp_path, **PLANS[name]))
    (phase,) = verdict["phases"]
    assert verdict["equal"]
    assert phase["first"] is None
    assert phase["largest"].keys() == LIMITS.keys()
    assert all(phase["largest"][kind] <= LIMITS[kind] for kind in LIMITS)
    assert phase["left_out"] == {"replicate": ["compression"], "8-bit": ["activations 8-bit"]}.get(name, [])
    assert verdict_text(verdict).startswith(f"equal: {verdict['processes']} processes compute what one device does")


WRONG: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "dropped_sum": ({"parallel__replicate": 2}, "gradient", "embedding.weight"),
    "forgotten_bucket": ({"parallel__replicate": 2, "parallel__bucket_bytes": 0}, "gradient", LOST),
    "wrong_place": ({"parallel__context": 2}, "gradient", "embedding.weight"),
    "stale_rank": ({"parallel__replicate": 2}, "update", "norm.weight"),
    "wrong_norm": ({"parallel__replicate": 2, "train__clip_norm": 0.0}, "grad_norm", None),
}
"""The plan under which each fault is made, and what is named."""


@pytest.mark.parametrize("fault", WRONG)
def test_what_differs_first_is_named(fault: str, tmp_path: Path) -> None:
    settings, what, parameter = WRONG[fault]
    verdict = in_pool(make_run(tmp_path, **settings), fault)
    (phase,) = verdict["phases"]
    assert not verdict["equal"]
    assert (phase["first"]["what"], phase["first"]["parameter"]) == (what, parameter)
    assert phase["first"]["difference"] > LIMITS[what]
    assert phase["first"]["rank"] in phase["first"]["ranks"]
    named = f"the {what} of {parameter} differs by" if parameter else f"the {what} differs by"
    assert f"not equal: {named}" in verdict_text(verdict)


def test_one_process_is_compared_with_plain_autograd(tmp_path: Path) -> None:
    verdict = verify(make_run(tmp_path, model__dropout=0.2, model__documents="separate"))
    assert verdict["equal"]
    assert verdict["phases"][0]["rows"] == 2


def test_every_phase_that_computes_something_else_is_compared(tmp_path: Path) -> None:
    phases = (
        Phase(name="first", steps=2),
        Phase(name="again", steps=2),
        Phase(name="frozen", steps=2, frozen=("embedding",), sequence_length=8),
    )
    verdict = verify(make_run(tmp_path, train__steps=None, train__phases=phases))
    assert [(phase["phase"], phase["equal"], phase["tokens"]) for phase in verdict["phases"]] == [
        ("first", True, 16),
        ("frozen", True, 8),
    ]
    assert "phase frozen: equal" in verdict_text(verdict)


def test_the_plain_side_is_a_gradient_by_finite_differences(tmp_path: Path) -> None:
    """The reference itself: the change of the loss along a direction is the gradient's part along it."""
    trial = make_trial(read_settings(make_run(tmp_path, train__optimizer__weight_decay=0.0)), 0)
    outcome = run_plainly(trial, device=torch.device("cpu"))
    rise = loss_along(trial, outcome, 1e-5) - loss_along(trial, outcome, -1e-5)
    slope = sum(float((part.local**2).sum()) for part in outcome.gradients.values())
    assert rise / 2e-5 == pytest.approx(slope, rel=1e-6)


def loss_along(trial: Trial, outcome: Outcome, distance: float) -> float:
    """The loss of the first step that far along its gradient."""
    model = build(trial.spec, seed=trial.settings.seed, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(outcome.gradients[name].local, alpha=distance)
    return backward_by_rows(model, trial.batches[0], seed=trial.seed, step=0)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"batch_size": 64, "microbatch_size": 8, "replicate": 2}, 1024),
        ({"batch_size": 64, "microbatch_size": 4, "context": 3, "tensor": 4, "sequence": True}, 24 * 500),
        ({"batch_size": 64, "microbatch_size": 2, "pipeline": 4, "chunks": 2, "schedule": "interleaved"}, 100),
        ({"batch_size": 64, "microbatch_size": 1, "shard": 4, "zero": 2, "exact": True}, 300),
        ({"batch_size": 64, "microbatch_size": 1, "context": 128, "tensor": 4, "sequence": True}, 1024),
    ],
)
def test_a_trial_is_small_and_its_plan_valid(settings: dict[str, Any], length: int) -> None:
    plan = Plan(device="cpu", precision="bf16", sequence_length=length, **settings)
    small, _ = trial_plan(plan, length=length)
    spec = small_spec(sequence_length=small.sequence_length or 0, layers=8, width=128, heads=128 * 4, mlp_width=512)
    assert list(problems(small, spec)) == []
    assert small.world == plan.world
    assert (small.sequence_length or 0) <= max(SHORT, length if plan.context == 128 else 0)
    assert small.batch_size <= plan.data * max(2, plan.pipeline)


def verified_within(number: int, run: Path, memory_bytes: int, fault: str = "") -> Verdict:
    """A rank's job."""
    with as_rank(number, 2) as patch:
        if fault:
            FAULTS[fault](patch)
        return verify(run, memory_bytes=memory_bytes)


LARGER: dict[str, Any] = {"model": Model(layers=8, width=64, heads=8, mlp_width=256)}
REDUCED: list[tuple[dict[str, Any], str]] = [
    ({"parallel__pipeline": 2, "plan__microbatch_size": 1}, "4 of 8 layers"),
    (
        {"parallel__tensor": 2},
        "1 of 8 layers; 2 of 8 heads of 8, width 16 of 64, hidden 64 of 256, vocabulary 64 of 257",
    ),
]


def needed(settings: Settings) -> int:
    """Bytes that comparing the whole model takes on a machine with two ranks."""
    return _memory_of(settings.planned.phases[0], OPTIMIZERS[settings.train.optimizer.kind].costs, local_world=2)


@pytest.mark.parametrize(("settings", "compared"), REDUCED)
def test_of_a_model_that_does_not_fit_a_part_is_compared_and_named(
    settings: dict[str, Any], compared: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path, **LARGER, **settings)
    (smaller,) = [c.planned for c in candidates(read_settings(run).planned.phases[0]) if c.compared == compared]
    limit = _memory_of(smaller, OPTIMIZERS["adamw"].costs, local_world=2)
    assert limit < needed(read_settings(run))
    verdicts = POOL.run(verified_within, run, limit, world=2)
    for verdict in verdicts:
        assert verdict["equal"]
        assert [phase["compared"] for phase in verdict["phases"]] == [compared]
    assert f"({compared}: 3 steps of" in verdict_text(verdicts[0])
    assert json.loads((run / VERDICT).read_text())["phases"][0]["compared"] == compared


def test_a_fault_is_noticed_in_a_part_of_the_model(tmp_path: Path) -> None:
    run = make_run(tmp_path, **LARGER, parallel__replicate=2)
    limit = needed(read_settings(run)) // 3
    verdict, _ = POOL.run(verified_within, run, limit, "dropped_sum", world=2)
    assert not verdict["equal"]
    assert verdict["phases"][0]["compared"].startswith("2 of 8 layers")


def test_candidates_shrink_and_their_plans_are_valid(tmp_path: Path) -> None:
    settings = {"parallel__pipeline": 2, "parallel__tensor": 2, "plan__microbatch_size": 1}
    planned = read_settings(make_run(tmp_path, **LARGER, **settings)).planned.phases[0]
    found = list(candidates(planned))
    assert [c.compared for c in found[:3]] == ["the whole model", "4 of 8 layers", "2 of 8 layers"]
    sizes = [c.planned.spec.parameters() for c in found]
    assert sizes == sorted(set(sizes), reverse=True)
    for candidate in found:
        assert list(problems(candidate.planned.plan, candidate.planned.spec)) == []
        assert candidate.planned.spec.head_size == planned.spec.head_size
        assert sum(map(len, candidate.planned.plan.stages)) == candidate.planned.spec.layers


def test_what_is_trained_in_the_last_layers_is_trained_in_a_part_of_the_model(tmp_path: Path) -> None:
    planned = read_settings(make_run(tmp_path, **LARGER)).planned.phases[0]
    planned = dataclasses.replace(planned, trained=("blocks.7.mlp.up.weight", "norm.weight"))
    two = list(candidates(planned))[1]
    assert two.planned.trained == ("blocks.1.mlp.up.weight", "norm.weight")


def test_a_machine_without_any_room_is_told_the_least(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs about .* in float64 even for 1 of 2 layers; .* 1 kB are free"):
        verify(make_run(tmp_path), memory_bytes=1000)


def test_memory_holds_the_model_and_its_moments_twice(tmp_path: Path) -> None:
    settings = read_settings(make_run(tmp_path, parallel__replicate=2))
    state = settings.planned.phases[0].spec.parameters() * 8 * 4
    need = needed(settings)
    # Weights, gradients and two moments on each of two ranks, with weights and gradients of the first step; weights
    # twice and gradients of the plain side. Activations come on top.
    numbers = 2 * (4 + 2) + 3
    assert numbers / 4 * state < need < numbers / 4 * state + 10_000_000


TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--no-python"]


@pytest.mark.parametrize(
    ("words", "before"),
    [
        pytest.param(["--nproc", "2"], [], id="--nproc"),
        pytest.param([], TORCHRUN, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_the_command_says_equal_and_trains_nothing(words: list[str], before: list[str], tmp_path: Path) -> None:
    ended = train_by_command(tmp_path, *words, "--verify", "parallel.tensor=2", "--json", before=before)
    assert ended.status == 0, ended.err
    verdict = json.loads(ended.out)
    assert (verdict["equal"], verdict["processes"], verdict["steps"]) == (True, 2, 3)
    run = tmp_path / "runs" / "tiny"
    assert json.loads((run / VERDICT).read_text()) == verdict
    assert not (run / "checkpoints").exists()


def test_the_command_fails_when_something_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"what": "update", "parameter": "norm.weight", "difference": "inf", "rank": 1, "ranks": [1]}
    phase = {"phase": "1", "equal": False, "rows": 2, "tokens": 16, "left_out": [], "largest": {}, "first": first}
    verdict = {"equal": False, "processes": 2, "steps": 3, "limits": LIMITS, "phases": [phase]}
    monkeypatch.setattr("ropewalk.flow.verbs.verify", lambda *arguments, **named: verdict)
    with pytest.raises(SystemExit) as ended:
        main(["train", "any.toml", "--verify"])
    assert ended.value.code == 1
    assert "not equal: the update of norm.weight differs by inf, most on rank 1 (" in capsys.readouterr().out
