"""Ways to attend that must agree."""

from __future__ import annotations

import pytest
import torch

from ropewalk.model.attend import CausalAttend, MaskedAttend, TiledAttend, attend_for, causal

from .specs import small

ROWS, LENGTH = 2, 160


def heads(spec):
    draw = torch.Generator().manual_seed(0)
    shapes = [(ROWS, count, LENGTH, spec.head_size) for count in (spec.heads, spec.kv_heads, spec.kv_heads)]
    return [torch.randn(shape, generator=draw) for shape in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "changes",
    [
        {"documents": "separate"},
        {"window": 20},
        {"position": "alibi"},
        {"position": "alibi", "documents": "separate", "window": 13},
    ],
    ids=str,
)
def test_tiles_leave_out_what_the_mask_hides_and_nothing_else(changes):
    spec = small(sequence_length=LENGTH, **changes)
    documents_BT = (torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.05).int().cumsum(1)
    masked = MaskedAttend(spec, documents_BT=documents_BT if spec.documents == "separate" else None)
    tiled = attend_for(spec, documents_BT=documents_BT, tiles=True)
    assert isinstance(tiled, TiledAttend)
    torch.testing.assert_close(tiled(*heads(spec)), masked(*heads(spec)), atol=2e-6, rtol=1e-5)


def test_a_kernel_that_cannot_gives_way_to_the_next():
    """There is no cuDNN on a CPU."""
    spec = small(sequence_length=LENGTH)
    chosen = attend_for(spec, kernel="cudnn")
    assert isinstance(chosen, CausalAttend)
    torch.testing.assert_close(chosen(*heads(spec)), causal(*heads(spec)), atol=2e-6, rtol=1e-5)
