"""What plans really issue, step after step, ends under NCCL's ordering rules (tests/plan/nccl_order.py)."""

from __future__ import annotations

import pytest

from ropewalk.parallel.mesh import Mesh
from tests.parallel.issued import Recorder
from tests.parallel.plans import Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import RATE, batches, start
from tests.plan.nccl_order import HostOperation, Issue, Nccl

pytestmark = pytest.mark.xdist_group("pool")

STEPS = 2
CASES = {
    # One microbatch: nothing else would load kernels or make communicators before the first receive.
    "1F1B": case("", "deep", pipeline=2, replicate=2, microbatch_size=4, bucket_bytes=4096),
    "zero-bubble": case("", "deep", pipeline=4, schedule="zero-bubble"),
    "interleaved": case("", "deep", pipeline=2, chunks=2, schedule="interleaved", shard=2, zero=3),
    "HSDP": case("", "deep", replicate=2, shard=2, zero=3),
    "three axes": case("", "deep", pipeline=2, context=2, tensor=2, sequence=True),
}


def issued(rank: int, each: Case) -> list[tuple[str, list[HostOperation]]]:
    """What a rank issues while it makes its groups, in each step, and when it scores twice."""
    recorder, found = Recorder(), []

    def end(what: str) -> None:
        found.append((what, list(recorder.issued)))
        recorder.issued.clear()

    with recorder.recording():
        mesh = Mesh(each.plan, rank)
        end("mesh")
        executor, _ = start(each, mesh)
        end("start")
        batch = batches(each.spec, 1)[0]
        for step in range(STEPS):
            executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=RATE)
            end(f"step {step}")
        for number in range(2):
            executor.score(batch)
            end(f"score {number}")
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_that_a_plan_issues_ends_under_the_rules_of_nccl(name: str) -> None:
    ranks = POOL.run(issued, CASES[name], world=CASES[name].plan.world)
    whole = [[operation for _, part in rank for operation in part] for rank in ranks]
    assert Nccl(whole, loads=True).stuck() == {}
    for rank in ranks:
        messages = {what: sum(isinstance(operation, Issue) for operation in part) for what, part in rank}
        if CASES[name].plan.pipeline > 1:
            assert messages["mesh"], "every channel is used when the mesh is made"
            assert messages["step 0"] == messages["score 0"] == 0, "first of their shape: relayed"
            assert messages["step 1"] == 2 * messages["score 1"] > 0
