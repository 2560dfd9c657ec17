"""Pipeline schedules: each does all work once, in an order that cannot lock, at the bubble and memory of its paper."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.plan.schedules import (
    PIPELINE_SCHEDULES,
    Action,
    Schedule,
    Shape,
    actions,
    check,
    in_order,
    make_schedule,
    needs,
    peak_live,
    receiver,
    sender,
)
from ropewalk.plan.simulate import Link, StageTimes, equal_stages_bubble, simulate

UNIT = StageTimes(forward=1.0, input=1.0, weight=1.0)


@st.composite
def pipelines(draw: st.DrawFn, *, most_ranks: int = 8) -> tuple[str, Shape]:
    """A kind and a shape that it can have."""
    kind = draw(st.sampled_from(sorted(PIPELINE_SCHEDULES)))
    ranks = draw(st.integers(1, most_ranks))
    if kind == "interleaved":
        rounds, chunks = draw(st.integers(1, most_ranks // 2)), draw(st.integers(2, 4))
        return kind, Shape(ranks=ranks, microbatches=rounds * ranks, chunks=chunks)
    return kind, Shape(ranks=ranks, microbatches=draw(st.integers(1, 3 * most_ranks)))


def limits(kind: str, shape: Shape) -> list[int]:
    return [peak_live(kind, rank=rank, shape=shape) for rank in range(shape.ranks)]


def written(own: list[Action]) -> str:
    return " ".join(f"{action.kind}{action.microbatch}" for action in own)


def relaxed(plan: Schedule, times: list[StageTimes]) -> dict[Action, float]:
    """When each action ends, by repeated relaxation of all constraints until none moves: slow and plain."""
    edges: dict[Action, list[Action]] = {}
    for own in plan:
        for before, action in itertools.pairwise([None, *own]):
            heard = {
                "F": [("F", action.stage - 1)],
                "B": [("F", action.stage), ("B", action.stage + 1)],
                "I": [("F", action.stage), ("I", action.stage + 1)],
                "W": [("I", action.stage)],
            }[action.kind]
            edges[action] = [Action(k, s, action.microbatch) for k, s in heard if 0 <= s < len(times)]
            edges[action] += [before] if before else []
    ends = dict.fromkeys(edges, 0.0)
    before_sweep: dict[Action, float] = {}
    while before_sweep != ends:
        before_sweep = dict(ends)
        for action, wanted in edges.items():
            ends[action] = max([ends[other] for other in wanted], default=0.0) + times[action.stage].of(action)
    return ends


def test_one_forward_one_backward_is_the_one_of_the_paper() -> None:
    plan = make_schedule("1f1b", Shape(ranks=4, microbatches=8))
    assert [written(own) for own in plan] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_zero_bubble_is_the_one_of_the_paper() -> None:
    plan = make_schedule("zero-bubble", Shape(ranks=3, microbatches=5))
    assert [written(own) for own in plan] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4",
    ]


def test_interleaved_takes_rounds_of_microbatches_through_the_chunks() -> None:
    own = actions("interleaved", rank=1, ranks=2, microbatches=4, chunks=2)
    assert " ".join(map(str, own)) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_every_schedule_is_right(pipeline: tuple[str, Shape]) -> None:
    kind, shape = pipeline
    assert check(make_schedule(kind, shape), shape=shape, live=limits(kind, shape)) == []


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_the_stated_memory_is_reached_and_not_exceeded(pipeline: tuple[str, Shape]) -> None:
    kind, shape = pipeline
    simulated = simulate(make_schedule(kind, shape), [UNIT] * shape.stages)
    assert list(simulated.peak_live) == limits(kind, shape)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_one_forward_one_backward_holds_what_lies_below_and_gpipe_all(ranks: int, microbatches: int) -> None:
    shape = Shape(ranks=ranks, microbatches=microbatches)
    assert limits("1f1b", shape) == [min(microbatches, ranks - stage) for stage in range(ranks)]
    assert limits("gpipe", shape) == [microbatches] * ranks
    assert max(limits("zero-bubble", shape)) == max(limits("1f1b", shape))


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_messages_are_read_in_the_order_in_which_they_were_sent(pipeline: tuple[str, Shape]) -> None:
    kind, shape = pipeline
    sent, read = defaultdict(list), defaultdict(list)
    for rank, own in enumerate(make_schedule(kind, shape)):
        for action in own:
            forward, microbatch = action.kind == "F", action.microbatch
            if (told := receiver(action, shape.stages)) is not None:
                sent[rank, told % shape.ranks, forward].append((told, microbatch))
            if (heard := sender(action, shape.stages)) is not None:
                read[heard % shape.ranks, rank, forward].append((action.stage, microbatch))
    assert sent == read


@settings(max_examples=100, deadline=None)
@given(pipelines(most_ranks=4), st.data())
def test_the_simulation_agrees_with_relaxation_of_its_constraints(
    pipeline: tuple[str, Shape], data: st.DataObject
) -> None:
    kind, shape = pipeline
    seconds = st.integers(1, 5)
    times = [
        StageTimes(forward=data.draw(seconds), input=data.draw(seconds), weight=data.draw(seconds))
        for _ in range(shape.stages)
    ]
    plan = make_schedule(kind, shape)
    simulated = simulate(plan, times)
    ends = {span.action: span.end for spans in simulated.ranks for span in spans}
    assert ends == relaxed(plan, times)
    assert simulated.makespan == max(ends.values())


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_the_bubble_of_equal_stages_is_the_closed_form(
    pipeline: tuple[str, Shape], forward: int, inputs: int, weight: int
) -> None:
    kind, shape = pipeline
    p, m, v = shape.ranks, shape.microbatches, shape.chunks
    weight = min(forward, inputs, weight)
    times = StageTimes(forward=forward, input=inputs, weight=weight)
    simulated = simulate(make_schedule(kind, shape), [times] * shape.stages)
    if kind == "zero-bubble":
        lost = (p - 1) * (forward + inputs - weight) + max(0, p - m) * weight
        expected = lost / (m * (forward + inputs + weight) + lost)
    else:
        expected = (p - 1) / (v * m + p - 1)
    assert simulated.bubble == pytest.approx(expected, abs=1e-12)
    assert equal_stages_bubble(kind, shape, times) == pytest.approx(expected, abs=1e-12)


def test_zero_bubble_wastes_a_third_of_what_one_forward_one_backward_does() -> None:
    shape = Shape(ranks=4, microbatches=8)
    idle = [simulate(make_schedule(kind, shape), [UNIT] * 4).idle for kind in ("1f1b", "zero-bubble")]
    assert idle == [(9.0,) * 4, (3.0,) * 4]


def test_the_closed_form_of_zero_bubble_ends_where_weights_take_longest() -> None:
    times = StageTimes(forward=1.0, input=1.0, weight=2.0)
    assert equal_stages_bubble("zero-bubble", Shape(ranks=2, microbatches=2), times) is None


def test_a_message_takes_its_latency_and_waits_for_the_link() -> None:
    plan = [[Action("F", 0, 0), Action("F", 0, 1)], [Action("F", 1, 0), Action("F", 1, 1)]]
    link = Link(latency_s=0.5, bytes_per_s=10.0, message_bytes=30)
    simulated = simulate(plan, [UNIT] * 2, link=link)
    # The first message leaves at 1, is on the link until 4 and there at 4.5; the second follows it at 7, there at 7.5.
    assert [(span.start, span.end) for span in simulated.ranks[1]] == [(4.5, 5.5), (7.5, 8.5)]


def test_what_a_rank_holds_is_known_over_time() -> None:
    shape = Shape(ranks=2, microbatches=2)
    simulated = simulate(make_schedule("1f1b", shape), [UNIT] * 2)
    assert simulated.live(0) == [(0.0, 1), (1.0, 2), (6.0, 1), (9.0, 0)]


def test_a_need_of_an_action_is_done_by_the_stage_it_hears_from() -> None:
    assert needs(Action("F", 0, 3), 4) == []
    assert needs(Action("B", 3, 1), 4) == [Action("F", 3, 1)]
    assert needs(Action("I", 1, 1), 4) == [Action("F", 1, 1), Action("I", 2, 1)]
    assert needs(Action("W", 1, 1), 4) == [Action("I", 1, 1)]


def test_ranks_that_wait_in_a_circle_are_found() -> None:
    shape = Shape(ranks=2, microbatches=2)
    plan = make_schedule("1f1b", shape)
    plan[0][1:] = [Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    plan[1] = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)]
    assert check(plan, shape=shape, live=[2, 2]) == ["nobody can go on: rank 0 before B0.0, rank 1 before F1.1"]
    with pytest.raises(AssertionError, match=r"B0\.0, F1\.1"):
        simulate(plan, [UNIT] * 2)


def test_a_schedule_of_two_steps_keeps_versions_apart() -> None:
    """Microbatch 1 begins before an update and ends after it, with the old weights; microbatch 2 has the new ones."""
    plan = [
        [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("F", 0, 2, 1), Action("B", 0, 1)],
        [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 2, 1)],
    ]
    shape = Shape(ranks=2, microbatches=3)
    for rank, own in enumerate(plan):
        own.append(Action("B", rank, 2, 1))
    assert check(plan, shape=shape, live=[2, 1]) == []
    simulated = simulate(plan, [UNIT, UNIT])
    assert str(simulated.ranks[0][-1].action) == "B0.2 v1"
    assert simulated.peak_live == (2, 1)
    plan[1][-1] = Action("B", 1, 2)
    assert "rank 1 takes several versions of stage 1 for microbatch 2" in check(plan, shape=shape, live=[2, 1])


def test_two_messages_unread_are_too_many_for_one_buffer() -> None:
    # Rank 1 takes the first message only after rank 0 has made two more: possible with room for three.
    send = [Action("F", 0, microbatch) for microbatch in range(3)]
    plan = [[*send, Action("F", 2, 0)], [Action("F", 1, 2), Action("F", 1, 1), Action("F", 1, 0)]]
    assert len(list(in_order(plan, stages=3))) == 7
    assert len(list(in_order(plan, stages=3, buffered=2))) == 7
    assert len(list(in_order(plan, stages=3, buffered=1))) == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda plan: plan[0].pop(), "rank 0 does F for stage 0, microbatch 3"),
        (lambda plan: plan[1].append(Action("F", 1, 0)), "rank 1 does F1.0 2 times"),
        (lambda plan: plan[1].append(Action("W", 1, 0)), "rank 1 does FBW for stage 1, microbatch 0"),
        (lambda plan: plan[1].append(Action("F", 2, 0)), "rank 1 does F2.0, which is not its stage"),
        (lambda plan: plan.append([]), "3 ranks have actions, not 2"),
        (
            lambda plan: plan[0].sort(key=lambda a: a.kind, reverse=True),
            "rank 0 holds 4 forward passes at once, not at most 2",
        ),
    ],
)
def test_a_wrong_schedule_is_told_why(change: object, complaint: str) -> None:
    shape = Shape(ranks=2, microbatches=4)
    plan = make_schedule("1f1b", shape)
    change(plan)
    assert complaint in check(plan, shape=shape, live=limits("1f1b", shape))


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("interleaved", Shape(ranks=2, microbatches=4), "`parallel.chunks` is 1; set it to 2 or more"),
        ("interleaved", Shape(ranks=4, microbatches=6, chunks=2), r"\(4\), which does not divide the 6 of a step"),
        ("1f1b", Shape(ranks=2, microbatches=4, chunks=2), "1f1b has one stage a rank; leave it out"),
        ("zero-bubble", Shape(ranks=2, microbatches=4, chunks=3), "`parallel.chunks` is 3"),
    ],
)
def test_a_shape_that_a_kind_cannot_have_is_refused(kind: str, shape: Shape, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_schedule(kind, shape)
    with pytest.raises(UserError, match=words):
        actions(kind, rank=0, ranks=shape.ranks, microbatches=shape.microbatches, chunks=shape.chunks)


def backward_first(rank: int, shape: Shape) -> list[Action]:
    """A user's schedule: every microbatch comes back before the next one begins."""
    return [Action(kind, rank, microbatch) for microbatch in range(shape.microbatches) for kind in ("F", "B")]


def stuck(rank: int, shape: Shape) -> list[Action]:
    return backward_first(rank, shape)[::-1]


def test_a_schedule_of_ones_own_is_made_and_checked() -> None:
    shape, kind = Shape(ranks=3, microbatches=4), f"{__name__}:backward_first"
    assert limits(kind, shape) == [1, 1, 1]
    simulated = simulate(make_schedule(kind, shape), [UNIT] * 3)
    assert simulated.makespan == 4 * 3 * (1 + 2)
    assert equal_stages_bubble(kind, shape, UNIT) is None
    with pytest.raises(UserError, match="gives no schedule that can be run: nobody can go on"):
        make_schedule(f"{__name__}:stuck", shape)
