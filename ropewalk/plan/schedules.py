"""Pipeline schedules as data: what every rank computes, in order.

A schedule is one list of actions a pipeline rank. Messages are implied: the forward pass of a stage needs that of the
stage before it, the backward pass that of the stage after it, for the same microbatch. `parallel` interprets these
lists, `plan.simulate` puts times on them, the monitor draws them.

Stage s lies on rank s modulo `ranks`; with several chunks the stages of a rank are therefore `ranks` apart.
Every kind hands over in the order in which the other side takes: for each pair of ranks and direction, messages are
received in the order in which they were sent, and one message in flight is enough.
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

    Zero-bubble schedules cut B in two: I gives the gradient of the stage's input, for which the stage before waits, and
    W those of its weights, for which nobody waits.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    version: int = 0
    """Which weights it computes with: those after so many updates since the schedule began. All actions of a stage for
    a microbatch have the same version."""

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}" + (f" v{self.version}" if self.version else "")


Schedule: TypeAlias = Sequence[Sequence[Action]]
"""The actions of every pipeline rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The size of a pipeline."""

    ranks: int
    microbatches: int
    chunks: int = 1
    """Stages of each rank."""

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


def actions(kind: str, *, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """What pipeline rank `rank` of `ranks` computes in one step, in order; a shape the kind cannot have is an error."""
    shape = Shape(ranks=ranks, microbatches=microbatches, chunks=chunks)
    return make_schedule(kind, shape)[rank]


def make_schedule(kind: str, shape: Shape) -> list[list[Action]]:
    """The actions of all ranks."""
    check_shape(kind, shape)
    schedule = _lists(kind, shape)
    if ":" in kind and (wrong := check(schedule, shape=shape, live=[len(own) for own in schedule])):
        raise UserError(f"`{kind}` gives no schedule that can be run: {wrong[0]}")
    return schedule


def _lists(kind: str, shape: Shape) -> list[list[Action]]:
    actions = PIPELINE_SCHEDULES[kind].load()
    return [actions(rank, shape) for rank in range(shape.ranks)]


def check_shape(kind: str, shape: Shape) -> None:
    """Says what to change where a pipeline of this shape cannot follow a schedule of this kind."""
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
    """What must be done before `action`: by its own stage, and by the stage whose message it waits for."""
    before: list[Action] = []
    if action.kind != "F":
        before.append(Action("I" if action.kind == "W" else "F", action.stage, action.microbatch, action.version))
    if (source := sender(action, stages)) is not None:
        before.append(Action(action.kind, source, action.microbatch, action.version))
    return before


def sender(action: Action, stages: int) -> int | None:
    """The stage whose message `action` waits for; None where there is none."""
    if action.kind == "F":
        return action.stage - 1 if action.stage else None
    return action.stage + 1 if action.kind != "W" and action.stage + 1 < stages else None


def receiver(action: Action, stages: int) -> int | None:
    """The stage that waits for the message of `action`; None where there is none."""
    if action.kind == "F":
        return action.stage + 1 if action.stage + 1 < stages else None
    return action.stage - 1 if action.kind != "W" and action.stage else None


def peak_live(kind: str, *, rank: int, shape: Shape) -> int:
    """The most forward passes whose activations `rank` holds at once, counted by stage and microbatch."""
    live = PIPELINE_SCHEDULES[kind].live
    return live(rank, shape) if live else max(held_after(_lists(kind, shape)[rank]), default=0)


def in_order(schedule: Schedule, *, stages: int, buffered: int | None = None) -> Iterator[tuple[int, Action]]:
    """The actions of all ranks, each with its rank, in an order in which they can happen.

    Ends early where ranks wait for one another. With `buffered`, a rank goes on after a send only once no more than
    that many of its messages to the same rank and in the same direction lie unread; without it sends never wait.
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
    """What is wrong with a schedule, in words; nothing for a right one.

    Every stage is where it belongs and does each microbatch once forward and once backward, whole or in two parts; all
    of it can happen when a rank waits to send until its last message was read; no rank holds more than `live` of it.
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
    # Without any room even 1F1B locks, since neighbours send to each other at the same time.
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
    """How many forward passes a rank holds after each of its actions: B frees one, and of its two parts W."""
    held = 0
    for action in own:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        yield held


def _gpipe(rank: int, shape: Shape) -> list[Action]:
    """GPipe (Huang et al. 2019): all forward passes, then all backward passes.

    Backward passes go in the order of the forward passes, not in reverse: gradients are then summed in the order of one
    device, at the same bubble and the same peak memory.
    """
    return [Action(kind, rank, microbatch) for kind in ("F", "B") for microbatch in range(shape.microbatches)]


def _one_forward_one_backward(rank: int, shape: Shape) -> list[Action]:
    """1F1B with a flush (PipeDream-Flush, Narayanan et al. 2021): the bubble of GPipe, at the memory of `ranks`
    microbatches however many there are."""
    forward = [Action("F", rank, microbatch) for microbatch in range(shape.microbatches)]
    backward = [Action("B", rank, microbatch) for microbatch in range(shape.microbatches)]
    return _alternate(forward, backward, first=shape.ranks - rank - 1)


def _interleaved(rank: int, shape: Shape) -> list[Action]:
    """Interleaved 1F1B (Megatron-LM, Narayanan et al. 2021): `ranks` microbatches go through the first stage of a rank,
    then the same ones through its second, and so on."""
    rounds = range(0, shape.microbatches, shape.ranks)
    places = [
        (chunk, first + place) for first in rounds for chunk in range(shape.chunks) for place in range(shape.ranks)
    ]
    forward = [Action("F", chunk * shape.ranks + rank, microbatch) for chunk, microbatch in places]
    last = shape.chunks - 1
    backward = [Action("B", (last - chunk) * shape.ranks + rank, microbatch) for chunk, microbatch in places]
    return _alternate(forward, backward, first=_interleaved_ahead(rank, shape))


def _interleaved_ahead(rank: int, shape: Shape) -> int:
    """Forward passes before the first that a backward pass follows at once."""
    return 2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * shape.ranks


def _zero_bubble(rank: int, shape: Shape) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, section 2.3): 1F1B whose backward passes are cut in two.

    Rank r puts W off by r microbatches: the last ranks answer sooner at the start and have W left to do at the end,
    where 1F1B idles. What is put off keeps its activations, so that every rank holds what the first does.
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
    """`first` forward passes, then forward and backward in turn, then the backward passes that remain."""
    first = min(first, len(forward))
    turns = zip(forward[first:], backward, strict=False)
    return [*forward[:first], *(action for turn in turns for action in turn), *backward[len(forward) - first :]]


def _idle_until_a_flush(shape: Shape, forward: float, input: float, weight: float) -> float:
    """Each rank waits through p - 1 forward and backward passes of a stage."""
    return (shape.ranks - 1) * (forward + input + weight)


def _idle_of_zero_bubble(shape: Shape, forward: float, input: float, weight: float) -> float | None:
    """ZB-H1 loses (p - 1) (F + I - W) with p microbatches or more (Qi et al. 2023, table 2), as long as W is no longer
    than F and I, in whose place it is put."""
    if weight > min(forward, input):
        return None
    # With fewer microbatches than ranks there are fewer W to fill the end with.
    filled = min(shape.microbatches, shape.ranks) - 1
    return (shape.ranks - 1) * (forward + input) - filled * weight


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule(Kind):
    """A kind of schedule: the target gives the actions of a rank, `(rank, shape) -> list[Action]`."""

    live: Callable[[int, Shape], int] | None = None
    """The most forward passes that a rank holds; None: counted."""
    idle: Callable[[Shape, float, float, float], float | None] | None = None
    """Seconds that a rank waits, from those of F, I and W of equal stages; None where there is no closed form."""
    interleaves: bool = False
    """Whether ranks have several stages, and microbatches go through them in rounds of `ranks`."""
    splits_backward: bool = False
    """Whether I and W take the place of B."""


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
