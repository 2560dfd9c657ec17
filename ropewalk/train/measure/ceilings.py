"""This device's limits, the ceilings of a roofline: measured in about a second, or from the data sheet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from ropewalk.plan.forecast import Precision
from ropewalk.plan.roofline import Ceilings

DENSE_BF16 = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""Dense FLOP/s in bfloat16 and float16 by a part of the GPU's name (first match), from the vendors' data sheets."""
EXPECTED_MFU = 0.5
"""MFU assumed before anything is measured; steps reach 0.42 to 0.64 on an H200 (docs/benchmarks.md)."""
NOMINAL_BYTES = {"H200": 4.8e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H100": 3.35e12, "A100": 2.04e12}
"""Memory bytes per second by a part of the GPU's name (first match), from the vendors' data sheets."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the multiplied matrices: 1.4 ms on an H200, 0.02 s on a core."""
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Larger than any cache, small enough for any machine."""
REPEATS = {"cuda": 100, "cpu": 5}


def expected_seconds(flops: float, device: torch.device, precision: Precision, *, ranks: int) -> float:
    """Rough time of `ranks` GPUs for `flops`; infinite on a CPU and where the peak is unknown."""
    peak = peak_flops(device, precision) if device.type == "cuda" else None
    return flops / (ranks * peak * EXPECTED_MFU) if peak else math.inf


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Peak FLOP/s, the denominator of MFU: from the data sheet for a known GPU in 16-bit precision; measured on a CPU,
    except in fp16, which CPUs emulate; else None."""
    if device.type == "cuda":
        if precision == "fp32":
            return None
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in DENSE_BF16.items() if part in name), None)
    if precision == "fp16":
        return None
    return matmul_flops(device, torch.float32 if precision == "fp32" else torch.bfloat16)


def measure_ceilings(device: torch.device, precision: Precision) -> Ceilings:
    """The best of several large matmuls in the dtype of `precision`, and of several copies. CPUs emulate fp8."""
    dtype = torch.float32 if precision == "fp32" else torch.float16 if precision == "fp16" else torch.bfloat16
    narrow = precision == "fp8" and device.type == "cuda"
    return Ceilings(
        flops=matmul_flops(device, dtype),
        bytes=copy_bytes(device),
        gemm_flops=eight_bit_flops(device) if narrow else None,
    )


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matmul with the memory layout of a linear layer; with another one a CPU takes forty times as
    long in float16. Operands are random: with zeros and ones a GPU needs less power and is faster than with any
    model."""
    size, draw = MATMUL_SIZE[device.type], torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=draw).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: left @ right.t(), device=device)


def eight_bit_flops(device: torch.device) -> float:
    """FLOP/s of the same matmul in e4m3 with one scale per operand, for GPUs from Hopper on."""
    size, draw = MATMUL_SIZE[device.type], torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=draw).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * size**3 / best_seconds(multiply, device=device)


def copy_bytes(device: torch.device) -> float:
    """Bytes per second read and written by a copy within the device's memory."""
    size = COPIED_BYTES[device.type]
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / best_seconds(lambda: target.copy_(source), device=device)


def nominal_bytes(device: torch.device) -> float | None:
    """Memory bytes per second from the data sheet; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((speed for part, speed in NOMINAL_BYTES.items() if part in name), None)


def best_seconds(work: Callable[[], object], *, device: torch.device) -> float:
    """The shortest of several calls after a warm-up call, by the device's own clock."""
    work()
    best = float("inf")
    for _ in range(REPEATS[device.type]):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            work()
            seconds = time.perf_counter() - begin
        best = min(best, seconds)
    return best
