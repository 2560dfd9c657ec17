"""The fastest this device can multiply, the denominator of MFU."""

from __future__ import annotations

import math

import torch

from ropewalk.plan.forecast import Precision

from .ceilings import product_flops

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
"""Dense FLOP/s in bfloat16 and float16 by a part of the GPU's name (the first that fits), from the makers' data
sheets."""

REACHED = 0.5
"""Share of the peak that steps reach, for a first guess: 0.42 to 0.64 on an H200 (docs/benchmarks.md)."""


def expected_seconds(flops: float, device: torch.device, precision: Precision, *, ranks: int) -> float:
    """About how long `ranks` GPUs take for `flops`; infinite where their peak is not known, and on a CPU."""
    peak = peak_flops(device, precision) if device.type == "cuda" else None
    return flops / (ranks * peak * REACHED) if peak else math.inf


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """FLOP/s: the data sheet's for a known GPU in two-byte numbers, else None; measured on a CPU, where no sheet tells
    it, but not in fp16, which CPUs only imitate."""
    if device.type == "cuda":
        if precision == "fp32":
            return None
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in DENSE_BF16.items() if part in name), None)
    if precision == "fp16":
        return None
    return product_flops(device, torch.float32 if precision == "fp32" else torch.bfloat16)
