"""When copies travel: in the gaps that training leaves, and how long that takes. Pure but for `Gate`, no torch.

A step uses a link (network, PCIe) in the same windows every time. They are learned from marks that the loop and the
collectives make, and chunks are started only where a gap has room for them (Gemini, Wang et al. 2023), and never while
a collective is known to be in flight: steps are not all alike. A discrete-event simulation of the
links, the windows and the tiers chooses the size of the chunks, the order in which tiers are served, and how often
each tier gets a copy. What it says of a transfer is compared with what is measured.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

HOLD_S, HOLD_STEPS = 1.0, 8
"""The longest that a slice waits for collectives in flight: so many steps, or seconds before their length is known."""
MEMORY = 32
"""Steps and transfers that medians look back on."""
BINS = 200
"""Parts of a step that are told apart when its windows are learned."""
SIZES = tuple(1 << power for power in range(16, 28))
"""Chunk sizes to choose from: 64 KiB to 128 MiB."""
MOST_CHUNKS = 4096
"""Of a transfer that is simulated to choose: larger states are cut in larger chunks. All choices take 0.2 s."""

Windows = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """When, in a step, training uses a link itself; every step alike."""

    step_s: float
    busy: Windows = ()
    """Seconds from the beginning of a step; in order, apart from each other."""

    @property
    def idle_s(self) -> float:
        """Seconds of a step that are free."""
        return self.step_s - sum(end - begin for begin, end in self.busy)

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a busy window; a gap may reach over the end of a step."""
        return max((end - begin for begin, end in self._gaps()), default=0.0) if self.busy else math.inf

    def start(self, at: float, need: float) -> float:
        """The first moment from `at` on that has `need` free seconds before it.

        What fits nowhere starts with the longest gap: it will be in training's way, but it will not wait for ever.
        """
        if not self.busy or self.idle_s <= 0:
            return at
        longest = self.longest_gap_s
        fits = need <= longest * (1 + 1e-12)
        step = math.floor(at / self.step_s) - 1
        while True:
            for begin, end in self._gaps():
                begin, end = begin + step * self.step_s, end + step * self.step_s
                first = max(at, begin)
                if first + need <= end + 1e-12 * max(1.0, end) if fits else begin >= at and end - begin >= longest:
                    return first
            step += 1

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of busy windows between two moments."""
        total = 0.0
        for step in range(math.floor(begin / self.step_s), math.floor(end / self.step_s) + 1):
            for first, last in self.busy:
                first, last = first + step * self.step_s, last + step * self.step_s
                total += max(0.0, min(end, last) - max(begin, first))
        return total

    def _gaps(self) -> list[tuple[float, float]]:
        """From the end of each busy window to the next, that of the following step included."""
        nexts = [begin for begin, _ in self.busy[1:]] + [self.busy[0][0] + self.step_s]
        return [(end, begin) for (_, end), begin in zip(self.busy, nexts, strict=True) if begin > end]


def learn(steps: Sequence[tuple[float, Windows]], *, share: float = 0.5) -> StepTraffic:
    """The profile of steps of (seconds, windows seen): busy is what was busy in at least `share` of them.

    Steps differ in length; windows are compared by their place in the step.
    """
    length = median(seconds for seconds, _ in steps)
    counts = [0] * BINS
    for seconds, windows in steps:
        seen = set()
        for begin, end in windows:
            seen |= set(range(math.floor(begin / seconds * BINS), min(BINS, math.ceil(end / seconds * BINS))))
        for number in seen:
            counts[number] += 1
    busy: list[tuple[float, float]] = []
    for number, count in enumerate(counts):
        if count >= share * len(steps):
            begin, end = number * length / BINS, (number + 1) * length / BINS
            if busy and math.isclose(busy[-1][1], begin):
                busy[-1] = (busy[-1][0], end)
            else:
                busy.append((begin, end))
    return StepTraffic(step_s=length, busy=tuple(busy))


@dataclass(slots=True)
class _Seen:
    """A step as it was marked."""

    begin: float
    end: float = math.inf
    windows: list[tuple[float, float]] = field(default_factory=list)
    """From its beginning."""


class TrafficLearner:
    """Marks of the loop -> profile. The loop marks, other threads read."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[_Seen] = deque(maxlen=MEMORY)
        self._open: _Seen | None = None
        self._count = 0
        self._learned: tuple[int, StepTraffic | None] = (0, None)
        self._in_flight: set[float] = set()
        self._free = threading.Event()
        self._free.set()

    @property
    def began(self) -> float | None:
        """When the step at hand began; None before the first."""
        now = self._open
        return now.begin if now else None

    def step(self) -> None:
        """A step begins."""
        now, before = self._clock(), self._open
        if before and now > before.begin:
            before.end = now
            self._steps.append(before)
            self._count += 1
            # What nobody has waited for in a whole step is in flight no more.
            self._in_flight = {begin for begin in self._in_flight if begin >= before.begin}
        self._open = _Seen(now)
        self._free_when_idle()

    def begin_use(self, at: float) -> None:
        """Training uses the link from now on, until `mark` says that what began at this moment is over."""
        self._in_flight.add(at)
        self._free.clear()

    def wait_free(self, most_s: float) -> bool:
        """Returns when training does not use the link, as far as is known, or after `most_s`; whether that was at
        once."""
        if self._free.is_set():
            return True
        self._free.wait(most_s)
        return False

    def _free_when_idle(self) -> None:
        if not self._in_flight:
            self._free.set()

    def mark(self, begin: float, end: float) -> None:
        """Training used the link from `begin` to `end`, by the same clock. What a GPU did becomes known late: the steps
        in which it was may be over."""
        self._in_flight.discard(begin)
        self._free_when_idle()
        for step in (*([self._open] if self._open else ()), *reversed(self._steps)):
            if end > step.begin and begin < step.end:
                step.windows.append((max(begin, step.begin) - step.begin, min(end, step.end) - step.begin))
            if begin >= step.begin:
                return

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Training uses the link in this block."""
        start = self._clock()
        try:
            yield
        finally:
            self.mark(start, self._clock())

    def profile(self) -> StepTraffic | None:
        """What was learned; None before the first step is over. Asked for every slice, so learned once a step."""
        count = self._count
        if self._learned[0] != count:
            self._learned = (count, learn([(step.end - step.begin, tuple(step.windows)) for step in list(self._steps)]))
        return self._learned[1]


class TransferGate:
    """Lets slices of a transfer go: never faster than the link allows, and into the gaps of the step."""

    def __init__(
        self,
        *,
        slice_bytes: int,
        bytes_per_s: float | None = None,
        expected_bytes_per_s: float | None = None,
        learner: TrafficLearner | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`bytes_per_s`: the most that may go; not set: all that the link carries. `expected_bytes_per_s`: what it is
        thought to carry, which says whether a slice fits in a gap; not set: as much as may go."""
        self.slice_bytes = slice_bytes
        self._most, self._rate, self._learner = bytes_per_s, expected_bytes_per_s or bytes_per_s, learner
        self._clock, self._sleep = clock, sleep
        self._due = clock()
        self.waited_s = 0.0
        """Seconds spent in waiting so far."""

    def wait(self, size: int) -> None:
        """Returns when the next `size` bytes may go."""
        asked = now = self._clock()
        held_until: float | None = None
        while True:
            at, step_s = self._begin(max(now, self._due), size)
            if at > now:
                self._sleep(at - now)
            if not self._learner:
                break
            now = self._clock()
            held_until = held_until or now + (HOLD_STEPS * step_s if step_s else HOLD_S)
            if now >= held_until or self._learner.wait_free(held_until - now):
                break
            # It is over, and the next may be near.
            now = self._clock()
        self._due = max(at, now) + (size / self._most if self._most else 0.0)
        self.waited_s += max(at, now) - asked

    def _begin(self, at: float, size: int) -> tuple[float, float | None]:
        """The first moment from `at` on at which a gap of the step has room for `size` bytes; and the length of a step,
        if that is known."""
        need = size / self._rate if self._rate else 0.0
        profile = self._learner.profile() if self._learner else None
        began = self._learner.began if self._learner else None
        if profile is None or began is None:
            return at, None
        return began + profile.start(at - began, need), profile.step_s


# Simulation

Order = Literal["tier", "chunk"]
"""`tier`: a link serves the first tier first. `chunk`: it serves the first chunks first, so tiers fill side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferLink:
    """A way that carries one chunk at a time."""

    bytes_per_s: float
    latency_s: float = 0.0
    """Of every chunk, on top."""
    shared: bool = False
    """Whether training uses it in its busy windows."""

    def seconds(self, size: int) -> float:
        """For a chunk of `size` bytes."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """A place that gets copies."""

    name: str
    link: str
    """The way there."""
    after: str = ""
    """The tier that it is copied from; empty: from the snapshot, which is all there at once."""
    interval_steps: int = 1
    """Steps between copies; a multiple of that of the tier before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulation says."""

    done_s: dict[str, tuple[float, ...]]
    """By tier: seconds from each snapshot until the copy is whole."""
    stall_s: float
    """Seconds that chunks reached into busy windows: training waits about as long."""

    @property
    def total_s(self) -> float:
        """Over all tiers, of the last snapshot that each took."""
        return sum(times[-1] for times in self.done_s.values())


def simulate(
    tiers: Sequence[Tier],
    links: Mapping[str, TransferLink],
    profile: StepTraffic,
    *,
    size: int,
    chunk: int,
    order: Order = "tier",
    snapshots: int = 1,
    every_steps: int = 1,
) -> Outcome:
    """Copies of `snapshots` states of `size` bytes, one every `every_steps` steps, to every tier whose turn it is."""
    return _Simulation(tiers, links, profile, size=size, chunk=chunk, order=order).run(snapshots, every_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How transfers are to go, with what the simulation says of it."""

    chunk_bytes: int
    order: Order
    outcome: Outcome


def choose(
    tiers: Sequence[Tier],
    links: Mapping[str, TransferLink],
    profile: StepTraffic,
    *,
    size: int,
    sizes: Sequence[int] = SIZES,
    stall_s: float = 0.0,
) -> Choice:
    """The chunk size and order with which all tiers are served soonest, of those that stall training for `stall_s` at
    most; when none does, the one that stalls it least."""
    choices = [
        Choice(
            chunk_bytes=chunk,
            order=order,
            outcome=simulate(tiers, links, profile, size=size, chunk=chunk, order=order),
        )
        for chunk in [chunk for chunk in sizes if size <= MOST_CHUNKS * chunk] or [max(sizes)]
        for order in _ORDERS
    ]
    return min(choices, key=lambda choice: (max(0.0, choice.outcome.stall_s - stall_s), choice.outcome.total_s))


def intervals(
    tiers: Sequence[Tier], links: Mapping[str, TransferLink], profile: StepTraffic, *, size: int, chunk: int
) -> dict[str, int]:
    """The smallest number of steps between copies with which each tier keeps up.

    Tiers come in their order. On a link that later tiers need too, one takes at most its even share of what is left.
    """
    left = {name: profile.idle_s if link.shared else profile.step_s for name, link in links.items()}
    found: dict[str, int] = {}
    for number, tier in enumerate(tiers):
        link = links[tier.link]
        chunks = _sizes(size, chunk)
        need = sum(link.seconds(one) for one in chunks)
        waiting = sum(other.link == tier.link for other in tiers[number:])
        base = found[tier.after] if tier.after else 1
        steps = math.ceil(need / (left[tier.link] / waiting) - 1e-9)
        found[tier.name] = max(1, math.ceil(steps / base)) * base
        left[tier.link] -= need / found[tier.name]
    return found


class TransferForecast:
    """How long a transfer to a tier will take, by what earlier ones took."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=MEMORY)

    @property
    def bytes_per_s(self) -> float | None:
        """Of the link alone, waiting left out; None before the first transfer."""
        return median(self._rates) if self._rates else None

    def seconds(self, size: int, profile: StepTraffic | None, *, chunk: int, most: float | None = None) -> float | None:
        """Of a transfer of `size` bytes in the gaps of the profile, at `most` bytes a second; None before the first."""
        if self.bytes_per_s is None:
            return None
        link = TransferLink(bytes_per_s=min(self.bytes_per_s, most or math.inf), shared=profile is not None)
        tier = Tier(name="it", link="way")
        outcome = simulate([tier], {"way": link}, profile or StepTraffic(step_s=1.0), size=size, chunk=chunk)
        return outcome.done_s["it"][0]

    def saw(self, size: int, *, seconds: float, waited_s: float = 0.0) -> None:
        """A transfer of `size` bytes took so long, of which it waited for its turn."""
        if size and seconds > waited_s:
            self._rates.append(size / (seconds - waited_s))


_ORDERS: tuple[Order, ...] = ("tier", "chunk")


@dataclass(slots=True)
class _Way:
    link: TransferLink
    waiting: list[tuple[tuple[int, ...], int, int, int]] = field(default_factory=list)
    """Heap of (rank in the order, snapshot, tier, chunk)."""
    taken: bool = False


class _Simulation:
    def __init__(
        self,
        tiers: Sequence[Tier],
        links: Mapping[str, TransferLink],
        profile: StepTraffic,
        *,
        size: int,
        chunk: int,
        order: Order,
    ) -> None:
        self._tiers, self._profile, self._order = tiers, profile, order
        self._ways = {name: _Way(link) for name, link in links.items()}
        self._chunks = _sizes(size, chunk)
        self._events: list[tuple[float, int, str, tuple[int, int, int]]] = []
        """Heap of (moment, number, what, (snapshot, tier, chunk))."""
        self._count = 0

    def run(self, snapshots: int, every_steps: int) -> Outcome:
        begins = [number * every_steps * self._profile.step_s for number in range(snapshots)]
        left = {}
        for snapshot, begin in enumerate(begins):
            for number, tier in enumerate(self._tiers):
                if snapshot * every_steps % tier.interval_steps == 0:
                    left[snapshot, number] = len(self._chunks)
                    if not tier.after:
                        for chunk in range(len(self._chunks)):
                            self._post(begin, "ready", (snapshot, number, chunk))
        done: dict[str, list[float]] = {tier.name: [] for tier in self._tiers}
        stall = 0.0
        while self._events:
            now, _, what, (snapshot, number, chunk) = heapq.heappop(self._events)
            tier = self._tiers[number]
            way = self._ways[tier.link]
            if what == "ready":
                heapq.heappush(way.waiting, (self._turn(snapshot, number, chunk), snapshot, number, chunk))
            elif what == "arrived":
                way.taken = False
                left[snapshot, number] -= 1
                if left[snapshot, number] == 0:
                    done[tier.name].append(now - begins[snapshot])
                for other, follower in enumerate(self._tiers):
                    if follower.after == tier.name and (snapshot, other) in left:
                        self._post(now, "ready", (snapshot, other, chunk))
            # All that happens at this moment comes before a choice is made.
            if not self._events or self._events[0][0] > now:
                stall += sum(self._serve(way, now) for way in self._ways.values())
        return Outcome(done_s={name: tuple(times) for name, times in done.items()}, stall_s=stall)

    def _serve(self, way: _Way, now: float) -> float:
        """Lets the next chunk go when it may; the seconds for which it is in training's way."""
        if way.taken or not way.waiting:
            return 0.0
        _, snapshot, tier, chunk = way.waiting[0]
        need = way.link.seconds(self._chunks[chunk])
        start = self._profile.start(now, need) if way.link.shared else now
        if start > now:
            # Looked at again then: a chunk with an earlier turn may have come.
            self._post(start, "look", (snapshot, tier, chunk))
            return 0.0
        heapq.heappop(way.waiting)
        way.taken = True
        self._post(now + need, "arrived", (snapshot, tier, chunk))
        return self._profile.overlap(now, now + need) if way.link.shared else 0.0

    def _turn(self, snapshot: int, tier: int, chunk: int) -> tuple[int, ...]:
        return (tier, snapshot, chunk) if self._order == "tier" else (snapshot, chunk, tier)

    def _post(self, moment: float, what: str, task: tuple[int, int, int]) -> None:
        heapq.heappush(self._events, (moment, self._count, what, task))
        self._count += 1


def _sizes(size: int, chunk: int) -> list[int]:
    """Of the chunks of a transfer: all alike but the last."""
    whole, rest = divmod(size, chunk)
    return [chunk] * whole + [rest] * (rest > 0)
