"""Continuous batching: sequences of different lengths share forward passes; a finished one makes room for the next.

Every live sequence has a slot of the cache. A step is one of two passes: if sequences have several tokens that the
cache lacks, a prefill of these sequences, otherwise a decode step, one token of each. Either gives one new token of
each of its sequences.

Prompts enter in lexicographic order, so that those with a common beginning follow each other: a prompt copies from a
slot what it shares with a text there. It waits a step where a prompt that enters now will have more to copy. Slots keep
their texts after a sequence has ended, until they are needed.

All ranks decide the same from the same tokens. Models without a cache read whole texts, those of one length at a time.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ropewalk.model.slot_cache import SlotPositions
from ropewalk.parallel.executor import Decoding

from ..task import Sampling
from .stop_strings import StopStrings
from .token_choice import Penalty, choose

PREFILL_TOKENS = 4096
"""Maximum tokens of a prefill pass with several sequences, which bounds its activations and masks."""
PADDING = 256
"""Positions of a prefill pass that may be padding, or an eighth of it: more sequences share the pass."""
LEAST_SHARED = 16
"""Fewer common tokens are computed again: a copy or a step of waiting would cost more."""
IDLE = 8
"""One slot of so many may be empty: new prompts enter together, and gaps are closed together."""


def context_start(length: int, limit: int) -> int:
    """The first of `length` tokens still in a context of at most `limit` tokens."""
    period = limit - limit // 2
    return max(0, -(-(length - limit) // period) * period)


@dataclass(slots=True)
class _Sequence:
    """A text that is being completed."""

    index: int
    """Of its prompt."""
    prompt: int
    """Tokens of the prompt."""
    text: list[int]
    random: np.random.Generator
    start: int
    """The first token in the context."""
    seen: int = 0
    """Tokens of the context in the cache."""

    @property
    def unseen(self) -> int:
        return len(self.text) - self.start - self.seen


@dataclass(slots=True)
class _Waiting:
    """Prompts in lexicographic order of what the model sees of them."""

    context: list[npt.NDArray[np.int64]]
    order: list[int]
    """Indices of prompts."""
    ranks: list[int] = field(init=False)
    """Places in `order` of those that still wait, ascending."""

    def __post_init__(self) -> None:
        self.ranks = list(range(len(self.order)))

    def shared(self, a: int, b: int) -> int:
        """Tokens that begin both of the contexts with these ranks."""
        one, other = self.context[self.order[a]], self.context[self.order[b]]
        length = min(len(one), len(other))
        differ = one[:length] != other[:length]
        return int(differ.argmax()) if differ.any() else length


class Batching:
    """Completes prompts, a step at a time. All ranks must call."""

    def __init__(
        self,
        decoding: Decoding,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int],
        end: int | None,
        vocabulary: int | None,
        text: Callable[[list[int]], str] | None,
    ) -> None:
        self.completions: list[list[int]] = [[] for _ in prompts]
        self.finished = 0
        """Completions that have ended."""
        self._decoding, self._prompts, self._sampling, self._seeds = decoding, prompts, sampling, seeds
        self._end, self._vocabulary = end, vocabulary
        self._stops = StopStrings(sampling.stop, text) if sampling.stop and text else None
        self._limit = decoding.spec.sequence_length
        contexts = [np.array(p[context_start(len(p), self._limit) :], np.int64) for p in prompts]
        self._waiting = _Waiting(contexts, sorted(range(len(prompts)), key=lambda index: contexts[index].tolist()))
        self._live: list[_Sequence | None] = [None] * decoding.slots
        """By slot."""
        self._held: list[int | None] = [None] * decoding.slots
        """The rank of the prompt whose keys and values a slot has."""
        self._penalty: Penalty | None = None

    @torch.no_grad()
    def step(self) -> bool:
        """Adds a token to some completions; returns whether there was one to add."""
        self._admit()
        slots = self._next_slots()
        if not slots:
            return False
        rows = [self._sequence(slot) for slot in slots]
        logits_BV = self._logits(slots, rows)
        token_B = None
        if logits_BV is not None:
            token_B = self._chosen(logits_BV[:, : self._vocabulary], slots, rows)
        # The only wait for the device in a step.
        tokens = self._decoding.share(token_B, rows=len(rows)).tolist()
        for slot, row, token in zip(slots, rows, tokens, strict=True):
            self._add(slot, row, token)
        return True

    def _sequence(self, slot: int) -> _Sequence:
        row = self._live[slot]
        assert row is not None
        return row

    def _admit(self) -> None:
        """Gives free slots to waiting prompts."""
        free = [slot for slot, row in enumerate(self._live) if row is None]
        waiting = self._waiting
        enough = len(free) >= min(len(waiting.ranks), max(1, len(self._live) // IDLE))
        if not (free and waiting.ranks and enough) or any(row and row.unseen > 1 for row in self._live):
            return
        held = sorted((rank, slot) for slot, rank in enumerate(self._held) if rank is not None)
        entering: list[tuple[int, int, int]] = []
        """(rank, slot to copy from, tokens to copy)"""
        for rank in waiting.ranks[: 4 * len(free)]:
            source, shared = self._source(rank, held)
            if self._decoding.has_cache and entering:
                later = waiting.shared(entering[-1][0], rank)
                if later >= shared + LEAST_SHARED:
                    continue
            entering.append((rank, source, shared))
            if len(entering) == len(free):
                break
        self._copy_shared(entering, free)
        entered = {rank for rank, _, _ in entering}
        waiting.ranks = [rank for rank in waiting.ranks if rank not in entered]
        for (rank, _, shared), slot in zip(entering, free, strict=False):
            self._enter(rank, slot, shared)

    def _source(self, rank: int, held: list[tuple[int, int]]) -> tuple[int, int]:
        """(slot, tokens) of the cached prompt that shares most: a neighbour in the order."""
        place = bisect.bisect(held, (rank, -1))
        near = [(self._cached(slot, other, rank), slot) for other, slot in held[max(0, place - 1) : place + 1]]
        shared, slot = max(near, default=(0, 0))
        # The last token is always computed: its logits are needed.
        shared = min(shared, len(self._waiting.context[self._waiting.order[rank]]) - 1)
        return slot, shared if shared >= LEAST_SHARED else 0

    def _cached(self, slot: int, held: int, rank: int) -> int:
        """Tokens of the prompt `rank` that the slot with the prompt `held` has; one that just entered has not all."""
        shared, row = self._waiting.shared(held, rank), self._live[slot]
        return min(shared, row.seen) if row else shared

    def _copy_shared(self, entering: list[tuple[int, int, int]], free: list[int]) -> None:
        copies = [(source, slot, n) for (_, source, n), slot in zip(entering, free, strict=False) if n]
        if copies:
            sources, targets, counts = zip(*copies, strict=True)
            self._decoding.copy(sources, targets, tokens=max(counts))

    def _enter(self, rank: int, slot: int, shared: int) -> None:
        index = self._waiting.order[rank]
        text = list(self._prompts[index])
        start = context_start(len(text), self._limit)
        random = np.random.default_rng(self._seeds[index])
        self._live[slot] = _Sequence(index, len(text), text, random, start, shared)
        self._held[slot] = rank if self._decoding.has_cache else None
        if self._penalty:
            self._penalty.begin(slot, text)

    def _next_slots(self) -> list[int]:
        """The slots of the next pass."""
        live = [slot for slot, row in enumerate(self._live) if row]
        by_length = sorted(live, key=lambda slot: -self._sequence(slot).unseen)
        if not live:
            return []
        if not self._decoding.has_cache:
            # The shortest catch up with the others.
            least = self._sequence(by_length[-1]).unseen
            return [slot for slot in by_length if self._sequence(slot).unseen == least]
        return self._prefill_slots(by_length) or self._close_gaps(live)

    def _prefill_slots(self, by_length: list[int]) -> list[int]:
        """The slots of a prefill pass with little padding; empty if no sequence has several new tokens."""
        longest, tokens = self._sequence(by_length[0]).unseen, 0
        chosen: list[int] = []
        for slot in by_length:
            new = self._sequence(slot).unseen
            padded = longest * (len(chosen) + 1)
            padding = padded - tokens - new
            if new == 1 or (chosen and (padded > PREFILL_TOKENS or padding > max(PADDING, tokens // 8))):
                break
            chosen.append(slot)
            tokens += new
        return sorted(chosen)

    def _close_gaps(self, live: list[int]) -> list[int]:
        """The slots of the live sequences, the last of them moved into gaps if too many are empty in between."""
        gaps = [slot for slot in range(live[-1]) if self._live[slot] is None]
        if len(gaps) * IDLE <= live[-1]:
            return live
        moves = [(source, target) for source, target in zip(reversed(live), gaps, strict=False) if source > target]
        sources, targets = zip(*moves, strict=True)
        self._decoding.copy(sources, targets, tokens=max(self._sequence(slot).seen for slot in sources))
        if self._penalty:
            self._penalty.copy(sources, targets)
        for source, target in moves:
            self._live[target], self._live[source] = self._live[source], None
            self._held[target] = self._held[source]
        return [slot for slot, row in enumerate(self._live) if row]

    def _logits(self, slots: list[int], rows: list[_Sequence]) -> Tensor | None:
        if not self._decoding.has_cache:
            return self._decoding.logits(self._on_device([row.text[row.start :] for row in rows]), None)
        keys = max(row.seen + row.unseen for row in rows)
        width = max(row.unseen for row in rows)
        if width == 1:
            # Over the gaps, so that the cache is read in place.
            tokens_B1, positions_B1 = [[0]] * (slots[-1] + 1), [[-1]] * (slots[-1] + 1)
            for slot, row in zip(slots, rows, strict=True):
                tokens_B1[slot], positions_B1[slot] = [row.text[-1]], [row.seen]
            at = SlotPositions(slice(0, slots[-1] + 1), self._on_device(positions_B1), keys)
            logits_BV = self._decoding.logits(self._on_device(tokens_B1), at)
            if logits_BV is None or len(slots) == slots[-1] + 1:
                return logits_BV
            return logits_BV[self._on_device(slots)]
        # Padding on the left: the last position of every row is its last token.
        tokens_BT = [[0] * (width - row.unseen) + row.text[len(row.text) - row.unseen :] for row in rows]
        positions_BT = [[-1] * (width - row.unseen) + [*range(row.seen, row.seen + row.unseen)] for row in rows]
        adjacent = slots[-1] - slots[0] + 1 == len(slots)
        own = slice(slots[0], slots[-1] + 1) if adjacent else self._on_device(slots)
        return self._decoding.logits(
            self._on_device(tokens_BT), SlotPositions(own, self._on_device(positions_BT), keys)
        )

    def _chosen(self, logits_BV: Tensor, slots: list[int], rows: list[_Sequence]) -> Tensor:
        sampling = self._sampling
        chances = [row.random.random() if sampling.temperature else 0.0 for row in rows]
        chances_B = self._on_device(chances, torch.float64)
        if sampling.repetition_penalty == 1:
            return choose(logits_BV, chances_B, sampling)
        penalty, where = self._remembered(logits_BV), self._on_device(slots)
        token_B = choose(penalty.apply(logits_BV, where), chances_B, sampling)
        penalty.add(where, token_B)
        return token_B

    def _remembered(self, logits_BV: Tensor) -> Penalty:
        """The penalty with all live texts, made by the rank that chooses when it first does."""
        if self._penalty is None:
            self._penalty = Penalty(
                self._sampling.repetition_penalty,
                slots=len(self._live),
                vocabulary=self._decoding.spec.vocabulary,
                device=logits_BV.device,
            )
            for slot, row in enumerate(self._live):
                if row:
                    self._penalty.begin(slot, row.text)
        return self._penalty

    def _on_device(self, numbers: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        # Without `non_blocking`, torch would wait for the device.
        return torch.tensor(numbers, dtype=dtype).to(self._decoding.device, non_blocking=True)

    def _add(self, slot: int, row: _Sequence, token: int) -> None:
        """Adds a token to a text, and ends it where it must."""
        if self._decoding.has_cache:
            row.seen += row.unseen
        completion = self.completions[row.index]
        if token != self._end:
            row.text.append(token)
            completion.append(token)
            shorter = self._stops.shortened(completion) if self._stops else None
            if shorter is None and len(completion) < self._sampling.max_new_tokens:
                self._keep_in_context(slot, row)
                return
            if shorter is not None:
                self.completions[row.index] = shorter
        self._live[slot] = None
        self.finished += 1

    def _keep_in_context(self, slot: int, row: _Sequence) -> None:
        start = context_start(len(row.text), self._limit)
        if start != row.start:
            row.start, row.seen = start, 0
            self._held[slot] = None
