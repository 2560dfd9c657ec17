"""The roofline: the work of a step against counts made otherwise, and the least time against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.model.decoder import build
from ropewalk.model.spec import Spec
from ropewalk.plan.roofline import KINDS, Ceilings, OpWork, breakdown, step_work
from tests.tiny import small_spec


def products_of(spec: Spec, rows: int) -> int:
    """FLOPs of matrix products, forward and backward, as torch counts them while it computes."""
    model = build(spec, seed=0)
    tokens = torch.zeros(rows, spec.sequence_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens, attend=lambda q, k, v: q + k.mean() + v.mean())
        (hidden @ model.head_weight.T).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("settings", [{}, {"mlp": "gelu", "bias": True, "tie_embeddings": False}, {"kv_heads": 2}])
def test_gemm_and_loss_are_the_products_that_torch_counts(settings: dict[str, object]) -> None:
    spec = small_spec(**settings)
    work = step_work(spec, rows=3, precision="fp32")
    assert work["gemm"].flops + work["loss"].flops == products_of(spec, rows=3)
    assert work["loss"].flops == 6 * 61 * 16 * 3 * 12


@pytest.mark.parametrize("window", [None, 5])
def test_attention_counts_the_pairs_that_are_seen(window: int | None) -> None:
    spec = small_spec(window=window)
    pairs = sum(0 <= query - key < (window or 12) for query in range(12) for key in range(12))
    # Each pair: a product of two vectors of 4 numbers forward and two backward, for the score and for the value.
    flops = 2 * (1 + 2) * (2 * 4) * pairs * spec.heads * spec.layers
    assert step_work(spec, rows=3, precision="bf16")["attention"].flops == pytest.approx(3 * flops)


def test_the_work_adds_up_to_the_flops_of_a_token() -> None:
    spec = small_spec()
    work = step_work(spec, rows=5, precision="bf16")
    assert sum(each.flops for each in work.values()) == pytest.approx(5 * 12 * spec.flops_per_token("causal"))


def test_adamw_moves_32_bytes_a_weight_and_with_narrow_gradients_30() -> None:
    spec = small_spec()
    # Gradient for its length; weight, gradient and two moments; weight and moments back.
    assert step_work(spec, rows=1, precision="bf16")["optimizer"].bytes == (1 + 4 + 3) * 4 * spec.parameters()
    # Gradients of two bytes; the narrow weights are written too.
    for pure in ("bf16-pure", "fp8"):
        moved = step_work(spec, rows=1, precision=pure)["optimizer"].bytes
        assert moved == (2 + 4 + 2 + 8 + 4 + 8 + 2) * spec.parameters()
    norm = ("norm.weight",)
    assert step_work(spec, rows=1, precision="bf16", trained=norm)["optimizer"].bytes == 32 * 16


def test_bytes_of_a_step_are_those_written_out_by_hand() -> None:
    # One layer, width 8, two heads of 4 with one key-value head, 12 features gated, rope, 10 tokens a row, 7 words.
    spec = small_spec(
        vocabulary=7, sequence_length=10, layers=1, width=8, heads=2, kv_heads=1, mlp_width=12, mlp="swiglu"
    )
    work = step_work(spec, rows=1, precision="bf16")
    # q and o have 8 numbers a token, k and v 4. Forward q k v -> o; backward q k v o do -> dq dk dv.
    assert work["attention"].bytes == 10 * 2 * ((8 + 4 + 4 + 8) + (8 + 4 + 4 + 8 + 8) + (8 + 4 + 4))
    maps = [(8, 16), (8, 8), (8, 24), (12, 8)]
    assert work["gemm"].bytes == sum(10 * 3 * (i + o) * 2 + i * o * (2 + 2 + 4) for i, o in maps)
    assert work["loss"].bytes == 10 * 3 * 8 * 2 + 7 * 8 * (2 + 2 + 4)
    branch = 8 * (4 + 2 + 4 + 2) + 8 * (4 + 4 + 2 + 4 + 2)
    activation = 2 * (24 + 12) + 2 * (24 + 12 + 24)
    rotation = 2 * 2 * (8 + 4) * 2
    embedding = 8 * (4 + 4) + 8 * 4
    assert work["other"].bytes == 10 * (2 * branch + activation + rotation + embedding) + 4 * 7 * 8


@given(st.floats(1, 1e18), st.floats(1, 1e15), st.floats(1e9, 1e16), st.floats(1e8, 1e13))
def test_the_least_time_is_the_longer_of_computing_and_moving(
    flops: float, moved: float, peak: float, bandwidth: float
) -> None:
    least = Ceilings(flops=peak, bytes=bandwidth).least_ms("loss", OpWork(flops=flops, bytes=moved))
    assert least / 1e3 >= flops / peak * (1 - 1e-12)
    assert least / 1e3 >= moved / bandwidth * (1 - 1e-12)
    assert least / 1e3 <= (flops / peak + moved / bandwidth) * (1 + 1e-12)


def test_narrower_products_have_a_ceiling_of_their_own() -> None:
    ceilings = Ceilings(flops=100.0, bytes=1e9, gemm_flops=200.0)
    work = OpWork(flops=400.0)
    assert (ceilings.least_ms("gemm", work), ceilings.least_ms("attention", work)) == (2000.0, 4000.0)


def test_a_breakdown_sets_measured_times_beside_the_least() -> None:
    times = dict.fromkeys(KINDS, 0.0) | {"gemm": 6.0, "optimizer": 3.0, "idle": 1.0}
    work = dict.fromkeys(KINDS, OpWork()) | {"gemm": OpWork(flops=3e9), "optimizer": OpWork(bytes=1e6)}
    found = {each.kind: each for each in breakdown(times, work, Ceilings(flops=1e12, bytes=1e9))}
    assert tuple(found) == KINDS
    assert sum(each.share for each in found.values()) == pytest.approx(1)
    assert (found["gemm"].least_ms, found["gemm"].distance, found["gemm"].share) == (3.0, 2.0, 0.6)
    assert (found["optimizer"].least_ms, found["optimizer"].distance) == (1.0, 3.0)
    assert found["idle"].distance is None
