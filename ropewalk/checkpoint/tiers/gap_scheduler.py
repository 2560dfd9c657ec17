"""Schedules copies into the gaps of a training step (Gemini, Wang et al. 2023). No torch.

Every step uses a link (network, PCIe) in the same windows. `TrafficLearner` learns these windows from marks of the loop
and of the collectives. `TransferGate` starts a slice of a copy only where a gap has room for it, and never while a
collective is known to be in flight, because steps differ. A simulation of the transfer chooses the size of slices and
the interval between copies, and predicts durations, which are reported next to the measured ones.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

HOLD_S, HOLD_STEPS = 1.0, 8
"""Maximum wait of a slice for collectives in flight: seconds before the step time is known, then steps."""
MEMORY = 32
"""Steps and transfers that medians cover."""
BINS = 200
"""Resolution of a learned step."""
SLICE_BYTES = 512 << 10
"""Slice size before a step was learned."""
SLICE_S = 1e-4
"""Overhead of a slice: Python, a system call, an acknowledgement within a cluster."""
SIZES = tuple(1 << power for power in range(16, 28))
"""Slice sizes to choose from: 64 KiB to 128 MiB."""
MAX_SLICES = 4096
"""Of a simulated transfer: larger states get larger slices. Simulating all sizes takes 0.2 s."""
_CHOOSE_EVERY = 16
"""Transfers between choices of the slice size."""

Windows = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """When training itself uses a link within a step."""

    step_s: float
    busy: Windows = ()
    """Seconds from the start of the step; sorted and disjoint."""

    @property
    def idle_s(self) -> float:
        """Free seconds per step."""
        return self.step_s - sum(end - begin for begin, end in self.busy)

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a busy window; a gap may cross the end of a step."""
        return max((end - begin for begin, end in self._gaps()), default=0.0) if self.busy else math.inf

    def start(self, at: float, need: float) -> float:
        """The first time from `at` on with `need` free seconds after it. A need that fits no gap starts with the
        longest gap: it delays training, but it does not wait forever."""
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
        """Busy seconds between two times."""
        total = 0.0
        for step in range(math.floor(begin / self.step_s), math.floor(end / self.step_s) + 1):
            for first, last in self.busy:
                first, last = first + step * self.step_s, last + step * self.step_s
                total += max(0.0, min(end, last) - max(begin, first))
        return total

    def _gaps(self) -> list[tuple[float, float]]:
        """From the end of each busy window to the start of the next, the last one in the following step."""
        nexts = [begin for begin, _ in self.busy[1:]] + [self.busy[0][0] + self.step_s]
        return [(end, begin) for (_, end), begin in zip(self.busy, nexts, strict=True) if begin > end]


def learn(steps: Sequence[tuple[float, Windows]]) -> StepTraffic:
    """The traffic of steps of (seconds, busy windows): a bin is busy when at least half of the steps use it.

    Steps differ in length; windows are compared by their relative position in the step.
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
        if 2 * count >= len(steps):
            begin, end = number * length / BINS, (number + 1) * length / BINS
            if busy and math.isclose(busy[-1][1], begin):
                busy[-1] = (busy[-1][0], end)
            else:
                busy.append((begin, end))
    return StepTraffic(step_s=length, busy=tuple(busy))


@dataclass(slots=True)
class _MarkedStep:
    begin: float
    end: float = math.inf
    windows: list[tuple[float, float]] = field(default_factory=list)
    """Relative to its start."""


class TrafficLearner:
    """Learns the traffic of a step. The training loop marks steps and transfers; other threads read."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[_MarkedStep] = deque(maxlen=MEMORY)
        self._open: _MarkedStep | None = None
        self._count = 0
        self._learned: tuple[int, StepTraffic | None] = (0, None)
        self._in_flight: set[float] = set()
        self._free = threading.Event()
        self._free.set()

    @property
    def began(self) -> float | None:
        """Start time of the current step; None before the first."""
        now = self._open
        return now.begin if now else None

    def step(self) -> None:
        """Marks the start of a step."""
        now, before = self._clock(), self._open
        if before and now > before.begin:
            before.end = now
            self._steps.append(before)
            self._count += 1
            # A collective without an end mark for a whole step counts as finished.
            self._in_flight = {begin for begin in self._in_flight if begin >= before.begin}
        self._open = _MarkedStep(now)
        self._free_when_idle()

    def begin_use(self, at: float) -> None:
        """Training uses the link from now on, until `mark` is called with this start time."""
        self._in_flight.add(at)
        self._free.clear()

    def wait_free(self, timeout_s: float) -> bool:
        """Waits until no marked transfer is in flight, at most `timeout_s`; whether the link was free at once."""
        if self._free.is_set():
            return True
        self._free.wait(timeout_s)
        return False

    def _free_when_idle(self) -> None:
        if not self._in_flight:
            self._free.set()

    def mark(self, begin: float, end: float) -> None:
        """Training used the link from `begin` to `end`, by the same clock. Times of a GPU arrive late: their steps may
        be over."""
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

    def traffic(self) -> StepTraffic | None:
        """The learned traffic; None before the first step has ended. Learned once per step: every slice asks."""
        count = self._count
        if self._learned[0] != count:
            self._learned = (count, learn([(step.end - step.begin, tuple(step.windows)) for step in list(self._steps)]))
        return self._learned[1]


class TransferGate:
    """Releases the slices of a transfer: below the bandwidth limit, and in the gaps of the step."""

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
        """`bytes_per_s`: bandwidth limit; not set: none. `expected_bytes_per_s`: bandwidth by which slices are fitted
        into gaps; not set: the limit."""
        self.slice_bytes = slice_bytes
        self._limit, self._rate, self._learner = bytes_per_s, expected_bytes_per_s or bytes_per_s, learner
        self._clock, self._sleep = clock, sleep
        self._due = clock()
        self.waited_s = 0.0
        """Total seconds of waiting."""

    def wait(self, size: int) -> None:
        """Returns when the next `size` bytes may be sent."""
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
            # The collective has ended; the next busy window may be near.
            now = self._clock()
        self._due = max(at, now) + (size / self._limit if self._limit else 0.0)
        self.waited_s += max(at, now) - asked

    def _begin(self, at: float, size: int) -> tuple[float, float | None]:
        """The first time from `at` on with a gap for `size` bytes, and the step time if known."""
        need = size / self._rate if self._rate else 0.0
        traffic = self._learner.traffic() if self._learner else None
        began = self._learner.began if self._learner else None
        if traffic is None or began is None:
            return at, None
        return began + traffic.start(at - began, need), traffic.step_s


# Simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferLink:
    """A link that sends one slice at a time."""

    bytes_per_s: float
    latency_s: float = 0.0
    """Added per slice."""
    shared: bool = False
    """Whether training uses the link in its busy windows."""

    def seconds(self, size: int) -> float:
        """Duration of a slice."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class SimulatedTransfer:
    """A transfer as simulated."""

    seconds: float
    stall_s: float
    """Seconds of slices that overlap busy windows: training waits about as long."""


def simulate(link: TransferLink, traffic: StepTraffic, *, size: int, chunk: int) -> SimulatedTransfer:
    """A transfer of `size` bytes in slices of `chunk`, from the start of a step."""
    now, stall = 0.0, 0.0
    for one in _slices(size, chunk):
        need = link.seconds(one)
        if link.shared:
            now = traffic.start(now, need)
            stall += traffic.overlap(now, now + need)
        now += need
    return SimulatedTransfer(now, stall)


def choose_slice(link: TransferLink, traffic: StepTraffic, *, size: int, sizes: Sequence[int] = SIZES) -> int:
    """The slice size that stalls training least and, among those, finishes first."""

    def cost(chunk: int) -> tuple[float, float]:
        transfer = simulate(link, traffic, size=size, chunk=chunk)
        return transfer.stall_s, transfer.seconds

    return min([chunk for chunk in sizes if size <= MAX_SLICES * chunk] or [max(sizes)], key=cost)


def intervals(
    tiers: Sequence[str], link: TransferLink, traffic: StepTraffic, *, size: int, chunk: int
) -> dict[str, int]:
    """The smallest number of steps between copies with which each tier keeps up.

    Tiers share the link in their order: each takes at most its even share of what the ones before it leave.
    """
    # A step without any gap still leaves a bin: the interval is then long, not infinite.
    left = max(traffic.idle_s, traffic.step_s / BINS) if link.shared else traffic.step_s
    need = sum(link.seconds(one) for one in _slices(size, chunk))
    found: dict[str, int] = {}
    for number, tier in enumerate(tiers):
        found[tier] = max(1, math.ceil(need / (left / (len(tiers) - number)) - 1e-9))
        left -= need / found[tier]
    return found


class TransferForecast:
    """Predicts the duration of a transfer from the bandwidth of earlier ones."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=MEMORY)

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth of the link while sending; None before the first transfer."""
        return median(self._rates) if self._rates else None

    def seconds(
        self, size: int, traffic: StepTraffic | None, *, chunk: int, bytes_per_s: float | None = None
    ) -> float | None:
        """Predicted seconds in the gaps of `traffic`, limited to `bytes_per_s`; None before the first transfer."""
        if self.bytes_per_s is None:
            return None
        link = TransferLink(bytes_per_s=min(self.bytes_per_s, bytes_per_s or math.inf), shared=traffic is not None)
        return simulate(link, traffic or StepTraffic(step_s=1.0), size=size, chunk=chunk).seconds

    def add(self, size: int, *, seconds: float, waited_s: float = 0.0) -> None:
        """Records a transfer that took `seconds`, of which it waited `waited_s` at the gate."""
        if size and seconds > waited_s:
            self._rates.append(size / (seconds - waited_s))


@dataclass(slots=True)
class TierLink:
    """The link to one tier: its measured bandwidth and the slice size in use."""

    limit_bytes_per_s: float | None
    forecast: TransferForecast = field(default_factory=TransferForecast)
    slice_bytes: int = SLICE_BYTES
    transfers: int = 0
    size: int = 0
    """Bytes of the last transfer."""

    @property
    def bytes_per_s(self) -> float | None:
        """Usable bandwidth; None before the first transfer."""
        known = self.forecast.bytes_per_s
        return min(known, self.limit_bytes_per_s) if known and self.limit_bytes_per_s else known

    def gate(self, learner: TrafficLearner, size: int) -> tuple[TransferGate, float | None]:
        """For the next transfer of `size` bytes; and its predicted seconds."""
        traffic, rate, self.size = learner.traffic(), self.bytes_per_s, size
        if traffic and traffic.busy and rate and self.transfers % _CHOOSE_EVERY == 1:
            link = TransferLink(bytes_per_s=rate, latency_s=SLICE_S, shared=True)
            self.slice_bytes = choose_slice(link, traffic, size=size)
        self.transfers += 1
        gate = TransferGate(
            slice_bytes=self.slice_bytes,
            bytes_per_s=self.limit_bytes_per_s,
            expected_bytes_per_s=rate,
            learner=learner,
        )
        predicted = self.forecast.seconds(size, traffic, chunk=self.slice_bytes, bytes_per_s=self.limit_bytes_per_s)
        return gate, predicted


def _slices(size: int, chunk: int) -> list[int]:
    whole, rest = divmod(size, chunk)
    return [chunk] * whole + [rest] * (rest > 0)
