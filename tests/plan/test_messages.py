"""Messages of a pipeline: every schedule ends under NCCL's ordering rules, and what hung before still hangs there."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from ropewalk.plan.messages import (
    IN_FLIGHT,
    Channel,
    Compute,
    Post,
    Programs,
    Release,
    Send,
    channels,
    forward_lists,
    program,
)
from ropewalk.plan.schedules import PIPELINE_SCHEDULES, Action, Shape, make_schedule, peak_live
from tests.plan.nccl_order import (
    Collective,
    Create,
    Issue,
    Meet,
    Nccl,
    Relay,
    Wait,
    host_program,
    unbatched_program,
)


def shapes(kind: str) -> Iterator[Shape]:
    """2 to 8 ranks, 1 to 4 chunks, 1 to 64 microbatches, as far as `kind` can have them."""
    for ranks in range(2, 9):
        for microbatches in range(1, 65):
            if kind != "interleaved":
                yield Shape(ranks=ranks, microbatches=microbatches)
            elif microbatches % ranks == 0:
                yield from (Shape(ranks=ranks, microbatches=microbatches, chunks=chunks) for chunks in (2, 3, 4))


def creations(shape: Shape, rank: int) -> list[Create]:
    found = []
    for each in channels(shape.ranks, wraps=shape.chunks > 1):
        for channel in each:
            if rank in (channel.source, channel.target):
                found.append(Create(channel, channel.target if rank == channel.source else channel.source))
    return found


def programs(kind: str, shape: Shape) -> list[list]:
    schedule = make_schedule(kind, shape)
    return [
        [*creations(shape, rank), *host_program(program(schedule, rank, stages=shape.stages))]
        for rank in range(shape.ranks)
    ]


def created(issued: list) -> list[Create]:
    """Every communicator that a rank will use."""
    return list(dict.fromkeys(Create(op.communicator, op.peer) for op in issued if isinstance(op, Issue)))


def warmed(issued: list[list]) -> list[list]:
    """The same with all communicators made first, in one order on all ranks."""
    order = sorted({(repr(c.communicator), c) for own in issued for c in created(own)}, key=lambda each: each[0])
    return [
        [
            *(c for _, c in order if c in created(own) and c.peer != rank),
            *own,
        ]
        for rank, own in enumerate(issued)
    ]


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Millions of small objects and no cycle among them: looking for one takes a quarter of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", PIPELINE_SCHEDULES)
def test_every_schedule_ends_under_the_rules_of_nccl(kind: str) -> None:
    for shape in shapes(kind):
        assert Nccl(programs(kind, shape)).stuck() == {}, shape


def test_forward_passes_alone_end_under_the_rules_of_nccl() -> None:
    for ranks in range(2, 9):
        for chunks in (1, 2, 4):
            shape = Shape(ranks=ranks, microbatches=9, chunks=chunks)
            lists = forward_lists(ranks, microbatches=9, chunks=chunks)
            own = [
                [*creations(shape, rank), *host_program(program(lists, rank, stages=shape.stages))]
                for rank in range(ranks)
            ]
            assert Nccl(own).stuck() == {}, shape


@pytest.mark.parametrize("kind", PIPELINE_SCHEDULES)
def test_a_channel_carries_the_same_messages_in_the_same_order_at_both_ends(kind: str) -> None:
    shape = Shape(ranks=4, microbatches=8, chunks=2 if kind == "interleaved" else 1)
    schedule = make_schedule(kind, shape)
    sent: dict[Channel, list] = {}
    received: dict[Channel, list] = {}
    for rank in range(4):
        own = program(schedule, rank, stages=shape.stages)
        for operation in own:
            if isinstance(operation, Send):
                sent.setdefault(operation.channel, []).append(operation.message)
            if isinstance(operation, Post):
                received.setdefault(operation.channel, []).append(operation.message)
        assert sum(isinstance(op, Release) for op in own) == sum(isinstance(op, Send) for op in own)
        finals = [op.action.stage for op in own if isinstance(op, Compute) and op.is_last]
        assert sorted(finals) == list(range(rank, shape.stages, 4))
    assert sent == received
    assert sent.keys() == {c for each in channels(4, wraps=shape.chunks > 1) for c in each}


@pytest.mark.parametrize("kind", PIPELINE_SCHEDULES)
def test_gradients_in_flight_are_few_and_hidden_states_wait_for_their_gradient_only(kind: str) -> None:
    shape = Shape(ranks=4, microbatches=16, chunks=2 if kind == "interleaved" else 1)
    schedule = make_schedule(kind, shape)
    for rank in range(4):
        held: Counter[bool] = Counter()
        for operation in program(schedule, rank, stages=shape.stages):
            if isinstance(operation, Send):
                held[operation.message.backward] += 1
            if isinstance(operation, Release):
                held[operation.message.backward] -= 1
            assert held[True] <= IN_FLIGHT * 2  # two channels at most lead backwards from a rank
            assert held[False] <= peak_live(kind, rank=rank, shape=shape)


def test_communicators_are_made_in_rounds_of_disjoint_pairs() -> None:
    """So the number of rounds does not grow with the pipeline, and no rank waits for a chain of others."""
    for ranks in range(2, 65):
        for wraps in (False, True):
            rounds = channels(ranks, wraps=wraps)
            assert len(rounds) <= 6
            for each in rounds:
                members = [rank for channel in each for rank in (channel.source, channel.target)]
                assert len(members) == len(set(members))


# What hung on a GPU (two and four processes, NCCL 2.28.9) hangs here.


def before(kind: str, shape: Shape, communicator: str) -> list[list]:
    schedule = make_schedule(kind, shape)
    return [
        unbatched_program(schedule, rank, stages=shape.stages, communicator=communicator)  # type: ignore[arg-type]
        for rank in range(shape.ranks)
    ]


def test_early_receives_hang_at_the_first_use_of_a_communicator() -> None:
    for ranks in (2, 4):
        issued = before("1f1b", Shape(ranks=ranks, microbatches=8), "pair")
        assert Nccl(issued).stuck()
        assert Nccl(warmed(issued)).stuck() == {}  # communicators were all that was missing


def test_early_receives_hang_when_both_directions_share_a_pair() -> None:
    assert Nccl(warmed(before("interleaved", Shape(ranks=2, microbatches=4, chunks=2), "pair"))).stuck()


def test_early_receives_hang_on_four_ranks_with_one_communicator() -> None:
    assert Nccl(warmed(before("1f1b", Shape(ranks=2, microbatches=8), "group"))).stuck() == {}
    assert Nccl(warmed(before("1f1b", Shape(ranks=4, microbatches=8), "group"))).stuck()


def test_loading_a_kernel_behind_a_spinning_receive_hangs() -> None:
    """Therefore the first step of a shape sends its messages through the hosts."""
    assert Nccl(warmed(before("1f1b", Shape(ranks=2, microbatches=8), "pair")), loads=True).stuck()
    shape = Shape(ranks=2, microbatches=1)
    schedule = make_schedule("1f1b", shape)
    cold = [host_program(program(schedule, rank, stages=2)) for rank in range(2)]
    assert Nccl([[*creations(shape, rank), *own] for rank, own in enumerate(cold)], loads=True).stuck()
    relayed = [host_program(program(schedule, rank, stages=2), relayed=True) for rank in range(2)]
    both = [[*creations(shape, rank), *relayed[rank], *cold[rank]] for rank in range(2)]
    assert Nccl(both, loads=True).stuck() == {}


def test_the_simulator_notices_a_wrong_order() -> None:
    """Two receives of a channel swapped, a send forgotten, communicators made in another order."""
    shape = Shape(ranks=4, microbatches=8)
    whole = programs("1f1b", shape)
    without = [[op for op in own if op != _first(own, "send")] if rank == 1 else own for rank, own in enumerate(whole)]
    assert Nccl(without).stuck()
    turned = [[*reversed(own[:4]), *own[4:]] if rank == 1 else own for rank, own in enumerate(whole)]
    assert Nccl(turned).stuck()


def test_collectives_end_in_the_same_order_only() -> None:
    """On one communicator always; on two that exist, where a rank waits for one before it issues the other."""
    one, other = (Collective(name, (0, 1), "all_reduce", name) for name in ("a", "b"))
    exist = [[Create("a", peer), Create("b", peer)] for peer in (1, 0)]
    assert Nccl([[one, other], [other, one]]).stuck()
    assert Nccl([[*exist[0], one, other], [*exist[1], other, one]]).stuck() == {}
    assert Nccl([[*exist[0], one, Wait("a"), other], [*exist[1], other, Wait("b"), one]]).stuck()
    first, second = (Collective("a", (0, 1), what, what) for what in ("all_reduce", "all_gather"))
    assert Nccl([[first, second], [first, second]]).stuck() == {}
    assert Nccl([[first, second], [second, first]]).stuck()
    assert Nccl([[first, Meet("hosts", (0, 1))], [Meet("hosts", (0, 1)), first]]).stuck()
    assert Nccl([[first], []]).stuck()


def test_a_relayed_message_waits_for_what_its_stream_waits_for() -> None:
    reduced = Collective("a", (0, 1), "all_reduce", "a")
    assert Nccl([[reduced, Wait("a"), Relay("put", "x")], [reduced, Relay("take", "x")]]).stuck() == {}
    assert Nccl([[reduced, Wait("a"), Relay("put", "x")], [Relay("take", "x"), reduced]]).stuck()


def _first(own: list, kind: str) -> Issue:
    return next(op for op in own if isinstance(op, Issue) and op.kind == kind)


def test_a_message_that_outlives_its_step_is_received_and_released_in_the_next() -> None:
    first = [[Action("F", 0, 0), Action("F", 0, 1)], [Action("F", 1, 0), Action("B", 1, 0)]]
    second = [[Action("B", 0, 0), Action("B", 0, 1)], [Action("F", 1, 1), Action("B", 1, 1)]]
    programs = [Programs(rank, stages=2) for rank in range(2)]
    steps = [[each.step(schedule) for each in programs] for schedule in (first, second)]
    late = [op for op in steps[1][1] if isinstance(op, Post)]
    assert [(op.message.microbatch, op.steps_ago) for op in late] == [(1, 1)]
    for rank in range(2):
        both = [*steps[0][rank], *steps[1][rank]]
        sent = [op.message for op in both if isinstance(op, Send)]
        assert sorted(op.message for op in both if isinstance(op, Release)) == sorted(sent)
        assert not any(isinstance(op, Release) and op.message.microbatch == 1 for op in steps[0][rank])
    shape = Shape(ranks=2, microbatches=2)
    joined = [[*creations(shape, r), *host_program([*steps[0][r], *steps[1][r]])] for r in range(2)]
    assert Nccl(joined).stuck() == {}
