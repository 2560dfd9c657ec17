"""Pipeline schedules as data: the computations of every rank, in order.

A schedule is one list of actions per pipeline rank. Messages are implied: a stage's forward pass needs that of the
stage before, its backward pass that of the stage after, for the same microbatch. `parallel` interprets these lists,
`plan.simulate` times them, the monitor draws them.

Stage s lies on rank s modulo `ranks`; with several chunks the stages of a rank are therefore `ranks` apart.
In every kind, and for each pair of ranks and direction, messages are received in the order in which they were sent,
so one message in flight suffices.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ropewalk.base.errors import UserError
from ropewalk.config.registry import Kind, Registry

ActionKind: TypeAlias = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One computation: F is the forward pass and B the backward pass of a stage for a microbatch.

    Zero-bubble schedules split B: I computes the gradient of the stage's input, which the previous stage waits for, and
    W the gradients of its weights, which no rank waits for.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    version: int = 0
    """Weight version: number of updates since the schedule began. Equal for all actions of a stage and microbatch."""

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}" + (f" v{self.version}" if self.version else "")


Schedule: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each pipeline rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The size of a pipeline."""

    ranks: int
    microbatches: int
    chunks: int = 1
    """Stages per rank."""

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


def actions(kind: str, *, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """Actions of pipeline rank `rank` of `ranks` in one step, in order; raises for an unsupported shape."""
    shape = Shape(ranks=ranks, microbatches=microbatches, chunks=chunks)
    return make_schedule(kind, shape)[rank]


def make_schedule(kind: str, shape: Shape) -> list[list[Action]]:
    """Actions of all ranks."""
    check_shape(kind, shape)
    schedule = _lists(kind, shape)
    if ":" in kind and (wrong := check(schedule, shape=shape, live=[len(own) for own in schedule])):
        raise UserError(f"`{kind}` gives no schedule that can be run: {wrong[0]}")
    return schedule


def _lists(kind: str, shape: Shape) -> list[list[Action]]:
    actions = PIPELINE_SCHEDULES[kind].load()
    return [actions(rank, shape) for rank in range(shape.ranks)]


def check_shape(kind: str, shape: Shape) -> None:
    """Raises an error that says what to change if this kind of schedule does not support the shape."""
    if PIPELINE_SCHEDULES[kind].interleaves:
        if shape.chunks < 2:
            raise UserError(
                f"`parallel.schedule` {kind} needs several stages a rank, and `parallel.chunks` is "
                f"{shape.chunks}; set it to 2 or more, or take 1f1b"
            )
        if shape.microbatches % shape.ranks:
            raise UserError(
                f"`parallel.schedule` {kind} takes microbatches in rounds of `parallel.pipeline` "
                f"({shape.ranks}), which does not divide the {shape.microbatches} of a step; change "
                "`train.batch_size` or `plan.microbatch_size`, or take 1f1b"
            )
    elif shape.chunks != 1:
        raise UserError(
            f"`parallel.chunks` is {shape.chunks}, but `parallel.schedule` {kind} has one stage a rank; "
            "leave it out, or take interleaved"
        )


def needs(action: Action, stages: int) -> list[Action]:
    """Dependencies of `action`: on its own stage, and on the stage whose message it waits for."""
    before: list[Action] = []
    if action.kind != "F":
        before.append(Action("I" if action.kind == "W" else "F", action.stage, action.microbatch, action.version))
    if (source := sender(action, stages)) is not None:
        before.append(Action(action.kind, source, action.microbatch, action.version))
    return before


def sender(action: Action, stages: int) -> int | None:
    """The stage whose message `action` waits for, if any."""
    if action.kind == "F":
        return action.stage - 1 if action.stage else None
    return action.stage + 1 if action.kind != "W" and action.stage + 1 < stages else None


def receiver(action: Action, stages: int) -> int | None:
    """The stage that waits for the message of `action`, if any."""
    if action.kind == "F":
        return action.stage + 1 if action.stage + 1 < stages else None
    return action.stage - 1 if action.kind != "W" and action.stage else None


def peak_live(kind: str, *, rank: int, shape: Shape) -> int:
    """Maximum number of forward passes whose activations `rank` holds at once, per stage and microbatch."""
    live = PIPELINE_SCHEDULES[kind].live
    return live(rank, shape) if live else max(held_after(_lists(kind, shape)[rank]), default=0)


def in_order(schedule: Schedule, *, stages: int, buffered: int | None = None) -> Iterator[tuple[int, Action]]:
    """Yields (rank, action) of all ranks in an executable order.

    Ends early on deadlock. With `buffered`, a rank continues after a send only when at most that many of its messages
    to the same rank and direction are unread; without it sends never block.
    """
    ranks = len(schedule)
    waiting = [deque(own) for own in schedule]
    done: set[Action] = set()
    unread: Counter[tuple[int, int, bool]] = Counter()
    last_sent: list[tuple[int, int, bool] | None] = [None] * ranks

    def may_go_on(rank: int) -> bool:
        channel = last_sent[rank]
        if channel is not None and buffered is not None and unread[channel] > buffered:
            return False
        return bool(waiting[rank]) and done.issuperset(needs(waiting[rank][0], stages))

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while may_go_on(rank):
                action = waiting[rank].popleft()
                if (heard := sender(action, stages)) is not None:
                    unread[heard % ranks, rank, action.kind == "F"] -= 1
                told = receiver(action, stages)
                last_sent[rank] = None if told is None else (rank, told % ranks, action.kind == "F")
                if (channel := last_sent[rank]) is not None:
                    unread[channel] += 1
                done.add(action)
                moved = True
                yield rank, action


def check(schedule: Schedule, *, shape: Shape, live: Sequence[int]) -> list[str]:
    """Lists the errors of a schedule; empty if it is valid.

    Each stage runs on its rank, with one forward and one backward pass (whole or split) per microbatch; no deadlock if
    each send blocks until the previous message was read; no rank holds more than `live` microbatches.
    """
    if len(schedule) != shape.ranks:
        return [f"{len(schedule)} ranks have actions, not {shape.ranks}"]
    return [*_wrong_work(schedule, shape), *_wrong_order(schedule, shape), *_held_too_much(schedule, live)]


def _wrong_work(schedule: Schedule, shape: Shape) -> Iterator[str]:
    for rank, own in enumerate(schedule):
        counts = Counter(own)
        work: dict[tuple[int, int], list[Action]] = {}
        for action in counts:
            work.setdefault((action.stage, action.microbatch), []).append(action)
        yield from (
            f"rank {rank} does {action}, which is not its stage"
            for action in counts
            if action.stage % shape.ranks != rank
        )
        yield from (f"rank {rank} does {action} {times} times" for action, times in counts.items() if times > 1)
        for stage in range(rank, shape.stages, shape.ranks):
            for microbatch in range(shape.microbatches):
                mine = work.get((stage, microbatch), [])
                done = "".join(kind for kind in get_args(ActionKind) if any(a.kind == kind for a in mine))
                if done not in ("FB", "FIW"):
                    yield f"rank {rank} does {done or 'nothing'} for stage {stage}, microbatch {microbatch}"
                if len({action.version for action in mine}) > 1:
                    yield f"rank {rank} takes several versions of stage {stage} for microbatch {microbatch}"


def _wrong_order(schedule: Schedule, shape: Shape) -> Iterator[str]:
    left = [deque(own) for own in schedule]
    # Unbuffered, even 1F1B deadlocks, since neighbours send to each other at the same time.
    for rank, _ in in_order(schedule, stages=shape.stages, buffered=1):
        left[rank].popleft()
    stuck = [f"rank {rank} before {own[0]}" for rank, own in enumerate(left) if own]
    if stuck:
        yield f"nobody can go on: {', '.join(stuck)}"


def _held_too_much(schedule: Schedule, live: Sequence[int]) -> Iterator[str]:
    for rank, (own, most) in enumerate(zip(schedule, live, strict=True)):
        held = max(held_after(own), default=0)
        if held > most:
            yield f"rank {rank} holds {held} forward passes at once, not at most {most}"


def held_after(own: Sequence[Action]) -> Iterator[int]:
    """Number of live forward passes after each action of a rank: freed by B or, when split, by W."""
    held = 0
    for action in own:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        yield held


def _gpipe(rank: int, shape: Shape) -> list[Action]:
    """GPipe (Huang et al. 2019): all forward passes, then all backward passes.

    Backward passes run in the order of the forward passes, not in reverse: gradients are then summed in the same order
    as on one device, with the same bubble and peak memory.
    """
    return [Action(kind, rank, microbatch) for kind in ("F", "B") for microbatch in range(shape.microbatches)]


def _one_forward_one_backward(rank: int, shape: Shape) -> list[Action]:
    """1F1B with a flush (PipeDream-Flush, Narayanan et al. 2021): the bubble of GPipe, with at most `ranks`
    microbatches in memory."""
    forward = [Action("F", rank, microbatch) for microbatch in range(shape.microbatches)]
    backward = [Action("B", rank, microbatch) for microbatch in range(shape.microbatches)]
    return _alternate(forward, backward, first=shape.ranks - rank - 1)


def _interleaved(rank: int, shape: Shape) -> list[Action]:
    """Interleaved 1F1B (Megatron-LM, Narayanan et al. 2021): `ranks` microbatches go through a rank's first stage,
    then through its second, and so on."""
    rounds = range(0, shape.microbatches, shape.ranks)
    places = [
        (chunk, first + place) for first in rounds for chunk in range(shape.chunks) for place in range(shape.ranks)
    ]
    forward = [Action("F", chunk * shape.ranks + rank, microbatch) for chunk, microbatch in places]
    last = shape.chunks - 1
    backward = [Action("B", (last - chunk) * shape.ranks + rank, microbatch) for chunk, microbatch in places]
    return _alternate(forward, backward, first=_interleaved_ahead(rank, shape))


def _interleaved_ahead(rank: int, shape: Shape) -> int:
    """Warm-up: forward passes before forward and backward passes alternate."""
    return 2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * shape.ranks


def _zero_bubble(rank: int, shape: Shape) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, section 2.3): 1F1B with split backward passes.

    Rank r delays W by r microbatches: the last ranks return gradients sooner at the start and have W left for the end,
    where 1F1B idles. Delayed W keeps its activations, so every rank holds as many as the first.
    """
    steps: list[Action] = []
    forward = [Action("F", rank, microbatch) for microbatch in range(shape.microbatches)]
    backward = [Action("I", rank, microbatch) for microbatch in range(shape.microbatches)]
    for action in _alternate(forward, backward, first=shape.ranks - rank - 1):
        steps.append(action)
        if action.kind == "I" and action.microbatch >= rank:
            steps.append(Action("W", rank, action.microbatch - rank))
    put_off = range(max(0, shape.microbatches - rank), shape.microbatches)
    return steps + [Action("W", rank, microbatch) for microbatch in put_off]


def _alternate(forward: list[Action], backward: list[Action], *, first: int) -> list[Action]:
    """`first` forward passes, then alternating forward and backward passes, then the remaining backward passes."""
    first = min(first, len(forward))
    turns = zip(forward[first:], backward, strict=False)
    return [*forward[:first], *(action for turn in turns for action in turn), *backward[len(forward) - first :]]


def _idle_until_a_flush(shape: Shape, forward: float, input: float, weight: float) -> float:
    """Each rank idles for p - 1 forward and backward passes of a stage."""
    return (shape.ranks - 1) * (forward + input + weight)


def _idle_of_zero_bubble(shape: Shape, forward: float, input: float, weight: float) -> float | None:
    """ZB-H1 idles for (p - 1) (F + I - W) with at least p microbatches (Qi et al. 2023, table 2), if W takes no longer
    than F and I, whose bubble it fills."""
    if weight > min(forward, input):
        return None
    # With fewer microbatches than ranks there are too few W to fill the end.
    filled = min(shape.microbatches, shape.ranks) - 1
    return (shape.ranks - 1) * (forward + input) - filled * weight


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule(Kind):
    """A kind of schedule; its target returns the actions of a rank, `(rank, shape) -> list[Action]`."""

    live: Callable[[int, Shape], int] | None = None
    """Maximum number of forward passes a rank holds; None: counted."""
    idle: Callable[[Shape, float, float, float], float | None] | None = None
    """Idle seconds per rank, from those of F, I and W of equal stages; None where there is no closed form."""
    interleaves: bool = False
    """Whether ranks have several stages, with microbatches in rounds of `ranks`."""
    splits_backward: bool = False
    """Whether B is split into I and W."""


PIPELINE_SCHEDULES: Registry[PipelineSchedule] = Registry(
    "pipeline schedule",
    {
        "gpipe": PipelineSchedule(
            target=_gpipe,
            live=lambda rank, shape: shape.microbatches,
            idle=_idle_until_a_flush,
            doc="all forward passes, then all backward passes; keeps every microbatch.",
        ),
        "1f1b": PipelineSchedule(
            target=_one_forward_one_backward,
            live=lambda rank, shape: min(shape.microbatches, shape.ranks - rank),
            idle=_idle_until_a_flush,
            doc="forward and backward passes in turn; keeps one microbatch per rank.",
        ),
        "interleaved": PipelineSchedule(
            target=_interleaved,
            live=lambda rank, shape: min(shape.microbatches * shape.chunks, _interleaved_ahead(rank, shape) + 1),
            idle=_idle_until_a_flush,
            interleaves=True,
            doc="1f1b with `chunks` stages per rank: a shorter bubble, more messages.",
        ),
        "zero-bubble": PipelineSchedule(
            target=_zero_bubble,
            live=lambda rank, shape: min(shape.microbatches, shape.ranks),
            idle=_idle_of_zero_bubble,
            splits_backward=True,
            doc="weight gradients fill the bubble (ZB-H1).",
        ),
    },
    kind=PipelineSchedule,
)
