"""The fastest this device can multiply, the denominator of MFU."""

from __future__ import annotations

import time
from typing import Literal

import torch

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
"""Dense bfloat16 FLOP/s by a part of the GPU's name (the first that fits), from the makers' data sheets."""


def peak_flops(device: torch.device, precision: Literal["fp32", "bf16"]) -> float | None:
    """FLOP/s: the data sheet's for a known GPU in bf16, else None; measured on a CPU, where no sheet tells it."""
    if device.type == "cuda":
        if precision != "bf16":
            return None
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in DENSE_BF16.items() if part in name), None)
    return _measured(torch.bfloat16 if precision == "bf16" else torch.float32)


def _measured(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """The best of a few square products, about 0.1 s in all."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
