"""The op classes of a trace, from traces written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ropewalk.parallel.labels import PREFIX
from ropewalk.train.measure.trace import kind_times

TRAINER, OTHER_THREAD, GPU = 1, 2, 7


def span(category: str, name: str, start: float, length: float, *, thread: int = TRAINER, **args: Any) -> dict:
    details = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": thread, "args": details}


def note(name: str, start: float, length: float) -> dict:
    return span("user_annotation", name, start, length)


def operator(name: str, start: float, length: float, *, thread: int = TRAINER, number: int | None = None) -> dict:
    numbered = {} if number is None else {"Sequence_number": number, "Fwd_thread_id": 0}
    return span("cpu_op", name, start, length, thread=thread, **numbered)


def node(name: str, start: float, length: float, *, number: int, thread: int = TRAINER, made_on: int = 1) -> dict:
    numbered = {"Sequence_number": number, "Fwd_thread_id": made_on}
    return span("cpu_op", f"autograd::engine::evaluate_function: {name}", start, length, thread=thread, **numbered)


def labels() -> list[dict]:
    """A step of 1000 us: forward, loss, backward, clipping and update."""
    return [
        note("ProfilerStep#3", 0, 1000),
        note(PREFIX + "forward", 0, 300),
        note(PREFIX + "loss", 300, 100),
        note(PREFIX + "backward", 400, 400),
        note(PREFIX + "clip and guard", 800, 50),
        note(PREFIX + "update", 850, 100),
    ]


def test_on_a_cpu_operators_are_told_apart_by_label_name_and_caller() -> None:
    events = [
        *labels(),
        operator("aten::linear", 10, 60),
        operator("aten::addmm", 20, 40),
        operator("aten::copy_", 25, 10),
        operator("aten::scaled_dot_product_attention", 100, 50, number=5),
        operator("aten::bmm", 110, 20),
        operator("aten::silu", 200, 30),
        operator("aten::mm", 310, 50, number=9),
        operator("aten::_fused_adamw_", 860, 80),
    ]
    found = kind_times({"traceEvents": events})
    assert found["gemm"] == pytest.approx(0.040)
    assert found["attention"] == pytest.approx(0.050), "the products inside attention are attention's"
    assert found["loss"] == pytest.approx(0.100), "all that is labelled so, with what is between operators"
    assert found["optimizer"] == pytest.approx(0.150)
    assert found["idle"] == 0
    assert found["other"] == pytest.approx(1.0 - 0.040 - 0.050 - 0.100 - 0.150)


def test_a_node_of_the_backward_pass_is_of_the_kind_of_what_made_it() -> None:
    events = [
        *labels(),
        operator("aten::mm", 10, 20, number=3),
        # Two operators without a node of their own bear the number of the one that makes it.
        operator("aten::empty", 90, 5, number=4),
        operator("aten::scaled_dot_product_attention", 100, 50, number=4),
        operator("aten::bmm", 110, 20, number=4),
        operator("aten::flatten", 290, 5, number=6),
        operator("aten::cross_entropy_loss", 310, 50, number=6),
        node("CrossEntropyBackward0", 410, 60, number=6),
        operator("aten::mm", 420, 30),
        node("BmmBackward0", 500, 40, number=4),
        operator("aten::bmm", 505, 30),
        node("MmBackward0", 600, 80, number=3),
        operator("aten::mm", 610, 50),
        operator("aten::add_", 665, 10),
    ]
    found = kind_times({"traceEvents": events})
    assert found["loss"] == pytest.approx(0.100 + 0.060)
    assert found["attention"] == pytest.approx(0.050 + 0.040)
    assert found["gemm"] == pytest.approx(0.020 + 0.050)


def test_numbers_of_another_thread_are_not_those_of_the_thread_that_trains() -> None:
    """What is computed again in the backward pass of a GPU makes its nodes on the backward thread."""
    events = [
        *labels(),
        operator("aten::mm", 10, 20, number=3),
        operator("aten::scaled_dot_product_attention", 310, 50, number=8),
        node("LossBackward0", 410, 20, number=8, thread=OTHER_THREAD),
        operator("aten::scaled_dot_product_attention", 450, 20, number=3, thread=OTHER_THREAD),
        node("AttentionBackward0", 500, 50, number=3, thread=OTHER_THREAD, made_on=2),
        span("cuda_runtime", "cudaLaunchKernel", 510, 5, thread=OTHER_THREAD, correlation=1),
        node("MmBackward0", 600, 50, number=3, thread=OTHER_THREAD, made_on=1),
        span("cuda_runtime", "cudaLaunchKernel", 610, 5, thread=OTHER_THREAD, correlation=2),
        span("kernel", "unknown", 520, 30, thread=GPU, correlation=1),
        span("kernel", "unknown", 620, 40, thread=GPU, correlation=2),
    ]
    found = kind_times({"traceEvents": events})
    assert found["attention"] == pytest.approx(0.030)
    assert found["other"] == pytest.approx(0.040)


def launched(
    kernel: str, asked: float, start: float, length: float, *, key: int, thread: int = TRAINER, kind: str = "kernel"
) -> list[dict]:
    return [
        span("cuda_runtime", "cudaLaunchKernel", asked, 1, thread=thread, correlation=key),
        span(kind, kernel, start, length, thread=GPU, correlation=key),
    ]


def test_kernels_of_a_gpu_are_told_apart_by_who_launched_them_or_by_name() -> None:
    events = [
        *labels(),
        # The host runs ahead: the loss's kernel is at work while the host is in `backward`.
        operator("aten::mm", 10, 5),
        *launched("some_kernel_of_a_library", 12, 20, 100, key=1),
        *launched("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 30, 120, 50, key=2),
        *launched("triton_poi_fused__to_copy_mm_silu_3", 40, 170, 30, key=3),
        *launched("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 50, 200, 60, key=4),
        *launched("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 350, 410, 90, key=5),
        *launched("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", 500, 510, 70, key=6, thread=OTHER_THREAD),
        *launched("multi_tensor_apply_kernel", 860, 870, 40, key=7),
        *launched("Memcpy DtoH", 960, 960, 10, key=8, kind="gpu_memcpy"),
    ]
    found = kind_times({"traceEvents": events})
    assert found["gemm"] == pytest.approx(0.150)
    assert found["attention"] == pytest.approx(0.060 + 0.070)
    assert found["loss"] == pytest.approx(0.090)
    assert found["optimizer"] == pytest.approx(0.040)
    assert found["other"] == pytest.approx(0.030 + 0.010)
    assert found["idle"] == pytest.approx(1.0 - 0.150 - 0.130 - 0.090 - 0.040 - 0.040)


def test_kinds_add_up_to_the_step_where_two_streams_work_at_once() -> None:
    events = [
        *labels(),
        note("ProfilerStep#4", 1000, 500),
        note(PREFIX + "update", 1100, 50),
        *launched("cutlass_gemm", 10, 100, 300, key=1),
        *launched("elementwise", 20, 200, 400, key=2),
        *launched("elementwise", 30, 250, 100, key=3),
        *launched("cutlass_gemm", 1050, 1400, 80, key=4),
    ]
    found = kind_times({"traceEvents": events})
    assert sum(found.values()) == pytest.approx(1.5 / 2)
    assert found["gemm"] == pytest.approx((0.300 + 0.080) / 2)
    assert found["other"] == pytest.approx(0.200 / 2), "from the end of the first to the end of the second"
