"""The KV cache of sequences of different lengths, against passes over whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ropewalk.model.decoder import Decoder, build
from ropewalk.model.protocol import ForwardPass
from ropewalk.model.slot_cache import SlotCache, SlotPositions
from tests.tiny import small_spec


def added(model: Decoder, cache: SlotCache, new: dict[int, list[int]], seen: dict[int, int]) -> dict[int, torch.Tensor]:
    """Logits after these tokens of each slot, added in one pass with padding."""
    width = max(map(len, new.values()))
    tokens = torch.tensor([[3] * (width - len(own)) + own for own in new.values()])
    positions = torch.tensor(
        [[-1] * (width - len(own)) + [*range(seen[slot], seen[slot] + len(own))] for slot, own in new.items()]
    )
    for slot, own in new.items():
        seen[slot] += len(own)
    slots = [*new]
    adjacent = slots == [*range(slots[0], slots[-1] + 1)]
    where = slice(slots[0], slots[-1] + 1) if adjacent else torch.tensor(slots)
    at = SlotPositions(where, positions, max(seen[slot] for slot in new))
    cache.begin(at)
    with torch.no_grad():
        outputs = model.run((), ForwardPass(tokens_BT=tokens, positions_BT=at.embedded_BT, cache=cache))
        return dict(zip(new, model.next_logits(outputs), strict=True))


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 1}, {"position": "alibi"}, {"position": "learned"}, {"window": 3}], ids=str
)
def test_padding_gaps_and_copies_leave_no_trace_in_the_logits(changes: dict[str, Any]) -> None:
    model = build(small_spec(sequence_length=16, **changes), seed=1, dtype=torch.float64)
    cache = model.cache(slots=4, room=16)
    texts: dict[int, list[int]] = {slot: [] for slot in range(4)}
    seen = dict.fromkeys(range(4), 0)
    numbers = torch.Generator().manual_seed(0)
    for counts in ({0: 5, 2: 2, 3: 1}, {0: 1, 1: 3, 2: 4}, {1: 1, 3: 6}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 2, 2: 7}):
        new = {slot: torch.randint(0, 20, (n,), generator=numbers).tolist() for slot, n in counts.items()}
        found = added(model, cache, new, seen)
        for slot, own in new.items():
            texts[slot] += own
            with torch.no_grad():
                whole = model.logits(model(torch.tensor([texts[slot]])))[0, -1]
            torch.testing.assert_close(found[slot], whole, rtol=0, atol=1e-12)
        if seen[3] == 7:  # slot 3 goes on with the beginning of slot 2, and slot 2 with that of slot 3
            cache.copy([2, 3], [3, 2], tokens=5)
            texts[2], texts[3] = texts[3][:5], texts[2][:5]
            seen[2] = seen[3] = 5
