"""The device, precision and microbatch for a machine, and the error when nothing fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.progress import amount
from ropewalk.base.seal import sealed_json
from ropewalk.model.activations import Division, saved_bytes
from ropewalk.plan.choose import choose
from ropewalk.plan.config import Layout, Parallel, Recompute
from ropewalk.plan.forecast import memory
from ropewalk.plan.machine import Gpu, Machine, memory_limits
from ropewalk.plan.memory_per_rank import of_rank
from ropewalk.plan.plan import PhasePlan, Plan, Planned, load_plan, save_plan
from tests.tiny import small_spec

GIB = 1 << 30


def machine(*, gpu: float | None = None, bf16: bool = False, memory_bytes: int = 8 * GIB) -> Machine:
    gpus = () if gpu is None else (Gpu(name="test GPU", memory_bytes=80 * GIB, capability=gpu),)
    return Machine(processor="test", cores=2, memory_bytes=memory_bytes, bf16=bf16, gpus=gpus)


def plan(here: Machine, layout: Layout | None = None, *, rows: int = 16, precision: str = "auto") -> PhasePlan:
    spec = small_spec(sequence_length=128)
    return choose(spec, layout or Layout(), here, batch_size=rows, steps=10, precision=precision)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("here", "device", "precision"),
    [
        (machine(), "cpu", "fp32"),
        (machine(bf16=True), "cpu", "bf16"),
        (machine(gpu=9.0), "cuda", "bf16"),
        (machine(gpu=8.0), "cuda", "bf16"),
        (machine(gpu=7.5, bf16=True), "cuda", "fp32"),
    ],
)
def test_device_and_precision_follow_the_hardware(here: Machine, device: str, precision: str) -> None:
    chosen = plan(here).plan
    assert (chosen.device, chosen.precision, chosen.world) == (device, precision, 1)


def test_what_the_user_sets_is_not_overruled() -> None:
    chosen = plan(machine(gpu=9.0, bf16=True), Layout(device="cpu", microbatch_size=2), precision="fp32").plan
    assert (chosen.device, chosen.precision, chosen.microbatch_size, chosen.microbatches) == ("cpu", "fp32", 2, 8)


@pytest.mark.parametrize(
    ("parallel", "compiled"),
    [
        (Parallel(), True),
        (Parallel(tensor=2), True),
        (Parallel(tensor=2, sequence=True, shard=2), True),
        (Parallel(context=2), True),
        (Parallel(pipeline=2), True),
        (Parallel(pipeline=2, schedule="zero-bubble"), False),
        (Parallel(recompute="attention"), False),
    ],
    ids=str,
)
def test_blocks_are_compiled_on_a_gpu_where_nothing_speaks_against_it(parallel: Parallel, compiled: bool) -> None:
    spec, gpu = small_spec(sequence_length=128), machine(gpu=9.0)

    def compiles(layout: Layout, here: Machine) -> bool:
        return choose(spec, layout, here, batch_size=16, steps=10, parallel=parallel, precision="fp32").plan.compile

    assert compiles(Layout(), gpu) == compiled
    assert not compiles(Layout(compile="off"), gpu)
    assert not compiles(Layout(), machine())


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"shows no GPU; set `plan\.device=cpu`"):
        plan(machine(), Layout(device="cuda"))


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 96), budget=st.integers(2_000_000, 100_000_000))
def test_the_microbatch_divides_the_batch_and_is_the_largest_that_fits(rows: int, budget: int) -> None:
    spec = small_spec(sequence_length=128)
    fitting = [
        r
        for r in range(1, rows + 1)
        if rows % r == 0 and memory(spec, rows=r, precision="bf16", device="cuda", accumulates=r < rows).total <= budget
    ]
    chosen = plan(machine(gpu=9.0), Layout(memory_bytes=budget), rows=rows)
    assert chosen.plan.microbatch_size == max(fitting)
    assert chosen.plan.microbatches * chosen.plan.microbatch_size == rows
    assert chosen.memory.total <= budget


def test_a_microbatch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"\(3\) does not divide `train.batch_size` \(16\)"):
        plan(machine(), Layout(microbatch_size=3))


@pytest.mark.parametrize(
    ("rows", "budget", "remedy"),
    [
        (16, 1_000_000, "set a smaller `plan.microbatch_size`"),
        (None, 300_000, "choose a smaller model or shorter sequences"),
        (16, 80_000, "choose a smaller model, or shard it over more processes"),
    ],
)
def test_a_run_that_does_not_fit_says_how_much_is_missing_and_what_helps(
    rows: int | None, budget: int, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan(machine(), Layout(microbatch_size=rows, memory_bytes=budget))
    message = str(caught.value)
    needed = memory(small_spec(sequence_length=128), rows=rows or 1, precision="fp32")
    assert f"{needed.total / 1e6:.3g} MB needed" in message or f"{needed.total / 1e3:.3g} kB needed" in message
    assert f"{amount(budget, 'B')} allowed" in message
    assert all(word in message for word in ("weights", "gradients", "optimizer", "activations", "workspace", remedy))


@pytest.mark.parametrize("processes", [1, 2])
def test_blocks_that_are_computed_again_leave_room(processes: int) -> None:
    spec, gpu = small_spec(layers=24, sequence_length=512), machine(gpu=9.0)
    needed = {
        again: choose(
            *(spec, Layout(memory_bytes=GIB, microbatch_size=8), gpu),
            parallel=Parallel(recompute=again, shard=processes),
            processes=processes,
            batch_size=16,
            steps=1,
            precision="fp32",
        ).memory
        for again in ("none", "attention", "full", "auto")
    }
    assert needed["auto"] == needed["none"], "there is room for all"
    assert needed["full"].activations < 0.2 * needed["none"].activations
    assert needed["attention"].activations < needed["none"].activations
    # And larger microbatches go where more were computed again.
    budget = round(1.1 * needed["full"].total)

    def chosen(again: Recompute) -> PhasePlan:
        parallel, layout = Parallel(recompute=again, shard=processes), Layout(memory_bytes=budget)
        settings = {"parallel": parallel, "processes": processes, "batch_size": 16, "steps": 1, "precision": "fp32"}
        return choose(spec, layout, gpu, **settings)  # type: ignore[arg-type]

    assert chosen("none").plan.microbatch_size < chosen("full").plan.microbatch_size == 8
    kept = chosen("auto")
    assert kept.memory.total <= budget


def test_a_rank_keeps_what_its_blocks_are_computed_again_from() -> None:
    """Inputs of blocks, which tensor ranks hold whole, where what is inside of blocks they would share."""
    spec = small_spec(layers=24, sequence_length=512)
    plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=4, tensor=2, recompute="full")
    rank = of_rank(memory(spec, rows=4, precision="fp32", recompute="full"), plan, spec)
    kept = saved_bytes(spec, rows=4, precision="fp32", recompute="full", division=Division(tensor=2))
    assert rank.activations == pytest.approx(kept, rel=0.05)


def test_what_does_not_fit_even_if_all_is_computed_again_is_refused() -> None:
    spec = small_spec(layers=24, sequence_length=512)
    settings = {"batch_size": 1, "steps": 1, "precision": "fp32"}
    full = memory(spec, rows=1, precision="fp32", recompute="full").total

    def chosen(again: Recompute, budget: int) -> PhasePlan:
        parallel, layout = Parallel(recompute=again), Layout(memory_bytes=budget)
        return choose(spec, layout, machine(), parallel=parallel, **settings)  # type: ignore[arg-type]

    assert chosen("full", full).memory.total == full
    assert chosen("auto", full).memory.total <= full
    with pytest.raises(UserError, match=r'it fits with `parallel.recompute = "full"`; set that or "auto"'):
        chosen("none", full)
    for again in ("full", "auto"):
        with pytest.raises(UserError, match="choose a smaller model"):
            chosen(again, full - 1)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    planned = Planned(phases=(plan(machine(bf16=True)), plan(machine(), rows=8)))
    save_plan(tmp_path, planned)
    assert load_plan(tmp_path) == planned


@pytest.mark.parametrize(
    ("change", "words"),
    [({"format": 5}, "has format 5, this ropewalk reads up to 4"), ({"phases": [{}]}, "this plan is damaged")],
)
def test_a_newer_or_damaged_plan_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    save_plan(tmp_path, Planned(phases=(plan(machine()),)))
    path = tmp_path / "plan.json"
    tree = json.loads(path.read_text()) | change
    del tree["seal"]
    path.write_bytes(sealed_json(tree))
    with pytest.raises(DataError, match=words):
        load_plan(tmp_path)


def test_a_plan_of_format_1_is_one_phase(tmp_path: Path) -> None:
    planned = Planned(phases=(plan(machine()),))
    (phase,) = planned.tree()["phases"]
    old = {"format": 1, **{key: phase[key] for key in ("plan", "spec", "memory", "steps")}}
    (tmp_path / "plan.json").write_text(json.dumps({**old, "derived": {"tokens": phase["tokens"]}}))
    assert load_plan(tmp_path) == planned


def test_shorter_rows_are_taken_more_at_a_time() -> None:
    chosen = plan(machine(), Layout(microbatch_size=4)).plan
    assert [chosen.microbatch_size_of(length) for length in (128, 64, 32)] == [4, 8, 16]


def test_tokens_and_flops_follow_from_steps_and_rows() -> None:
    planned = plan(machine())
    assert planned.tokens == 10 * 16 * 128
    assert planned.flops == planned.tokens * planned.spec.flops_per_token("causal")


@pytest.mark.parametrize(
    ("file", "text", "limits"),
    [
        ("memory.max", "1073741824\n", [GIB]),
        ("memory.max", "max\n", []),
        ("memory/memory.limit_in_bytes", "536870912\n", [GIB // 2]),
    ],
)
def test_a_containers_memory_limit_counts(tmp_path: Path, file: str, text: str, limits: list[int]) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert memory_limits(tmp_path) == limits
