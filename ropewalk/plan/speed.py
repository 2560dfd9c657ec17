"""Estimates a machine's training speed from a timed matmul or a GPU's data sheet, and the share that training reaches.

For sizing a run before anything exists; a run reports its own speed.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ropewalk.config.threads import one_thread
from ropewalk.model.spec import Spec

from .machine import Gpu, Machine

ASSUMED_GPU = Gpu(name="RTX 4090 (assumed)", memory_bytes=24 << 30, capability=8.9)
"""Assumed when a GPU is requested and none is present."""

_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "H800": 989,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "A6000": 155,
    "A40": 150,
    "A10G": 70,
    "A10": 125,
    "L4": 121,
    "5090": 210,
    "4090": 165,
    "4080": 97,
    "3090": 71,
    "V100": 125,
    "T4": 65,
}
"""Dense bfloat16 (else float16) with float32 accumulation, from data sheets; the first matching name counts."""
_TFLOPS_BY_CAPABILITY = ((9.0, 500), (8.9, 100), (8.0, 70), (0.0, 30))
_GPU_SHARE = 0.4
"""Share of the data sheet's FLOP/s that models of width 768 and more reach; 124M reaches 47 % on an H200."""
_LAYER_S, _STEP_S = 1.5e-3, 5e-3
"""Minimum time of a layer and of the rest of a step on a GPU."""
_BF16 = (1.3, 90)
_FP32 = (0.62, 65)
"""(a, b): training in this precision reaches a W / (W + b) times the speed of a large float32 matmul for width W. One
core of an EPYC: 0.54 at a width of 64, 0.75 at 128, 1.2 at 256 in bfloat16, 0.41 at 128 in float32 (docs/log.md)."""
_RUN_SHARE = 0.7
"""Share of a run's time spent in steps; the rest is validation, saving and reading."""
_CORE_LOSS = 0.05
"""Loss per additional core: 8 cores count as 6, 64 as 15, since small models parallelize poorly."""
_MATMUL = 512
"""Rows and columns of the timed matmul: large enough for full speed, small enough for the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A machine's speed."""

    device: Literal["cpu", "cuda"]
    flops: float
    """FLOP/s of large matmuls: float32 on a CPU, bfloat16 on a GPU."""
    words: str
    """The machine and the source of the figure, in words."""
    bf16: bool = False
    """Whether a CPU has bfloat16 in hardware."""
    memory_bytes: int = 8 << 30

    def tokens_per_s(self, spec: Spec, *, batch_tokens: int) -> float:
        """Tokens per second of a run, including validation and saving."""
        flops = _token_flops(spec)
        if self.device == "cuda":
            work_s = batch_tokens * flops / (self.flops * _GPU_SHARE * min(1.0, spec.width / 768))
            return _RUN_SHARE * batch_tokens / max(work_s, _STEP_S + spec.layers * _LAYER_S)
        most, half = _BF16 if self.bf16 else _FP32
        return _RUN_SHARE * self.flops * most * spec.width / (spec.width + half) / flops


def speed_of(machine: Machine, *, gpu: bool = False, seconds: float = 0.3) -> Speed:
    """The speed of `machine`: its GPU's from the data sheet, else its cores', measured within `seconds`. With `gpu` and
    no GPU present, that of an assumed one."""
    if gpu or machine.gpus:
        chosen = machine.gpus[0] if machine.gpus else ASSUMED_GPU
        flops = 1e12 * _tflops(chosen)
        words = f"{chosen.name}, {flops / 1e12:,.0f} TFLOP/s by its data sheet"
        return Speed(device="cuda", flops=flops, words=words, bf16=True, memory_bytes=chosen.memory_bytes)
    core_flops = measured_core_flops(seconds)
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    words = f"{machine.processor}, {cores}, {core_flops / 1e9:,.0f} GFLOP/s per core measured"
    flops = core_flops * machine.cores / (1 + _CORE_LOSS * (machine.cores - 1))
    return Speed(device="cpu", flops=flops, words=words, bf16=machine.bf16, memory_bytes=machine.memory_bytes)


def measured_core_flops(seconds: float) -> float:
    """FLOP/s of a float32 matmul on one core: the fastest within `seconds` by CPU time, which other work on the machine
    affects little. In its own process, since numpy's matmul threads are fixed once numpy is loaded."""
    command = [sys.executable, "-m", __name__, str(seconds)]
    done = subprocess.run(command, env=one_thread(), capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout)


def _quickest(seconds: float) -> float:
    """CPU seconds of the fastest of at least three matmuls."""
    factor = np.full((_MATMUL, _MATMUL), 0.5, np.float32)
    out = np.empty_like(factor)
    best = float("inf")
    start, number = time.thread_time(), 0
    while number < 3 or time.thread_time() - start < seconds:
        begun = time.thread_time()
        np.matmul(factor, factor, out=out)
        best, number = min(best, time.thread_time() - begun), number + 1
    return best


@functools.lru_cache(64)
def _token_flops(spec: Spec) -> int:
    return spec.flops_per_token("causal")


def _tflops(gpu: Gpu) -> float:
    for name, tflops in _TFLOPS.items():
        if name in gpu.name.upper():
            return tflops
    return next(tflops for least, tflops in _TFLOPS_BY_CAPABILITY if gpu.capability >= least)


if __name__ == "__main__":
    sys.stdout.write(f"{2.0 * _MATMUL**3 / _quickest(float(sys.argv[1]))}\n")
