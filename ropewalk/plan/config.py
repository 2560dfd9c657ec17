"""Settings of `plan` and `parallel`: how a step is laid out on the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range
from ropewalk.model.activations import Activations

from .schedules import PIPELINE_SCHEDULES

Fp8 = Literal["quicker", "all"]
Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Settings of the plan; those left out are chosen by the plan."""

    microbatch_size: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Sequences in one forward and backward pass of a rank; must divide `train.batch_size`. Not set: as many as the
    memory forecast allows."""
    device: Annotated[Literal["auto", "cpu", "cuda"], CONTINUES] = "auto"
    """Device of the model; `auto` uses a GPU if there is one."""
    memory_bytes: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Memory the run may use. Not set: 80 % of the device's (or of this machine's for the CPU)."""
    compile: Annotated[Switch, CONTINUES] = "auto"
    """Whether torch.compile fuses the kernels of a block. `auto`: on a GPU, wherever possible. Takes a few seconds at
    the start of a run, once for all layers; later runs reuse the result."""
    deterministic: Annotated[bool, CONTINUES] = False
    """Bitwise reproducible steps on a GPU, as on a CPU. Cost: attention without cuDNN's kernels, which take 0.6 to 0.7
    of the time of the others but sum in any order in the backward pass (H200)."""
    fp8: Annotated[Fp8, CONTINUES] = "quicker"
    """Which matmuls of blocks use 8 bits with `train.precision = "fp8"`. `quicker`: those that a measurement at the
    start of the run finds faster, row-wise or with one scale per operand. `all`: every one, with one scale, for the
    same rounding on every machine. `deterministic` and a CPU use `all`."""
    tuning: Annotated[Switch, CONTINUES] = "auto"
    """Whether to autotune the cuBLASLt algorithm of each matmul at the start of a run, once per kind of GPU; the
    fastest save about 2 % of a step (1.36B, H200). `auto`: for at most 10 s, and at most half of what the run can gain;
    `on`: all matmuls, up to a minute; `off`: torch's choice."""


ZeroStage = Literal[1, 2, 3]
ContextKind = Literal["ring", "ulysses"]
Recompute = Literal["none", "attention", "full", "auto"]
Compression = Literal["none", "bf16", "fp16", "powersgd"]
Backend = Literal["auto", "nccl", "gloo", "mpi"]
Offload = Literal["activations", "optimizer", "parameters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Parallelism degrees and options. The product of the degrees is the number of processes; with `--nproc`, remaining
    processes are replicas."""

    replicate: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Data-parallel degree (DDP): replicas of the model, each with its own sequences. Not set: all processes left by
    the other degrees."""
    shard: Annotated[int, Range(least=1), CONTINUES] = 1
    """FSDP / ZeRO degree: ranks that shard one model replica (see `zero`) and read different sequences."""
    zero: Annotated[ZeroStage, CONTINUES] = 3
    """What `shard` ranks partition (ZeRO, Rajbhandari et al. 2020): 1 optimizer state, 2 also gradients, 3 also
    parameters."""
    tensor: Annotated[int, Range(least=1), CONTINUES] = 1
    """Tensor-parallel degree (Megatron-LM): ranks that split every matmul; must divide the key and value heads."""
    sequence: Annotated[bool, CONTINUES] = True
    """Sequence parallelism: `tensor` ranks also split the activations between matmuls by position (Korthikanti et al.
    2022)."""
    context: Annotated[int, Range(least=1), CONTINUES] = 1
    """Context-parallel degree: ranks that split every sequence by position."""
    context_method: Annotated[ContextKind, CONTINUES] = "ring"
    """How `context` ranks attend. `ring`: keys and values circulate. `ulysses`: an all-to-all exchanges heads for
    positions."""
    pipeline: Annotated[int, Range(least=1), CONTINUES] = 1
    """Pipeline-parallel degree: ranks that split the layers."""
    schedule: Annotated[str, PIPELINE_SCHEDULES, CONTINUES] = "1f1b"
    """Pipeline schedule: the order of the microbatches. `module:attr` names a function of your own, from rank and
    shape to actions (`ropewalk/plan/schedules.py`)."""
    chunks: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Pipeline stages per rank. Not set: 2 for `interleaved`, otherwise 1."""
    recompute: Annotated[Recompute, CONTINUES] = "none"
    """Activation checkpointing: what the backward pass recomputes instead of keeping. `none`; the inside of
    `attention`; `full` blocks; `auto`: as many blocks as `plan.memory_bytes` requires, planned for every sequence
    length."""
    saved_activations: Annotated[Activations, CONTINUES] = "whole"
    """How blocks save activations for the backward pass. `whole`: unchanged. `packed`: one bit per mask element, the
    same gradients. `8-bit`: also one byte per input element of linear layers, norms and activation functions; gradients
    within 1 %. Recomputed blocks keep their input unchanged."""
    partition_activations: Annotated[bool, CONTINUES] = False
    """Whether `tensor` ranks partition the inputs that `recompute` keeps (ZeRO-R)."""
    offload: Annotated[tuple[Offload, ...], CONTINUES] = ()
    """What is kept in host memory while not in use."""
    offload_path: Annotated[str, CONTINUES] = ""
    """Folder on a fast disk that holds offloaded tensors instead of host memory."""
    exact: Annotated[bool, CONTINUES] = False
    """Bitwise equal results for any power of two of data-parallel ranks. Cost: gradients are reduced after every
    microbatch."""
    balance: Annotated[bool, CONTINUES] = False
    """Whether sequences are distributed over data-parallel ranks by the cost of their attention, for packed documents
    of uneven length. Helps where attention skips pairs of different documents; a kernel that masks them takes the same
    time for every sequence."""
    resplit: Annotated[bool, CONTINUES] = False
    """Whether a continued run splits the layers of a pipeline again by measured times. Off: an unbalanced pipeline is
    only reported."""
    devices: Annotated[int, Range(least=1), CONTINUES] = 1
    """GPUs driven by one process, each with a replica of the model; on a CPU, threads. Processes (`--nproc`) are faster
    and support the rest of this section."""
    bucket_bytes: Annotated[int, Range(least=0), CONTINUES] = 25 << 20
    """Bucket size of gradient reductions, which overlap with the backward pass: a bucket is sent when it reaches this
    size. 0 sends each gradient separately."""
    gradient_compression: Annotated[Compression, CONTINUES] = "none"
    """Compression of gradients between replicas: none, rounding to 16 bits, or low-rank factors (PowerSGD, Vogels et
    al. 2019)."""
    powersgd_rank: Annotated[int, Range(least=1), CONTINUES] = 4
    """Rank of the factors of `powersgd`."""
    backend: Annotated[Backend, CONTINUES] = "auto"
    """Communication backend. `auto`: NCCL for GPUs, gloo for CPUs. `mpi` runs under `mpirun`."""
