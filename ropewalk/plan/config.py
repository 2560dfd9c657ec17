"""Settings of `plan` and `parallel`: how a step is laid out on the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range
from ropewalk.model.activations import Activations

Fp8 = Literal["quicker", "all"]
Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the plan may decide, and what is decided for it."""

    microbatch_size: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Sequences in one forward and backward pass of a rank; must divide `train.batch_size`. Not set: as many as the
    memory forecast allows."""
    device: Annotated[Literal["auto", "cpu", "cuda"], CONTINUES] = "auto"
    """Where the model runs; `auto` takes a GPU when there is one."""
    memory_bytes: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Memory the run may use. Not set: 80 % of the device's (or of this machine's for the CPU)."""
    compile: Annotated[Switch, CONTINUES] = "auto"
    """Whether torch.compile fuses the kernels of a block. `auto`: on a GPU, wherever it can. Takes some seconds when a
    run begins, once for all layers; what was compiled is kept for later runs."""
    deterministic: Annotated[bool, CONTINUES] = False
    """Whether the same step gives the same bits on a GPU, as it does on a CPU anyway. Price: attention without cuDNN's
    kernels, whose backward pass adds up in any order; they take 0.6 to 0.7 of the time of the others (H200)."""
    fp8: Annotated[Fp8, CONTINUES] = "quicker"
    """Which products of blocks `train.precision = "fp8"` makes in 8 bits: those that a measurement at the start of the
    run finds quicker so, row by row or with one scale for an operand; or `all`, whatever they take, with one scale,
    for the same rounding on every machine. `deterministic` and a CPU take all."""
    tuning: Annotated[Switch, CONTINUES] = "auto"
    """Whether the algorithms of cuBLASLt for each matmul are measured when a run begins, once per kind of GPU; a step
    takes about 2 % less time with the quickest (1.36B, H200). `auto`: for at most 10 s, and at most half of what the
    run can gain; `on`: all of them, up to a minute; `off`: torch's choice."""


ZeroStage = Literal[1, 2, 3]
ContextKind = Literal["ring", "ulysses"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "attention", "full", "auto"]
Compression = Literal["none", "bf16", "fp16", "powersgd"]
Backend = Literal["auto", "nccl", "gloo", "mpi"]
Offload = Literal["activations", "optimizer", "parameters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How several processes share a run. The degrees multiply to the number of processes; whatever they leave over of
    `--nproc` replicates."""

    replicate: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Copies of the model, each on its own rows. Not set: what the other degrees leave of the processes."""
    shard: Annotated[int, Range(least=1), CONTINUES] = 1
    """Ranks that read different rows and share the state of one copy of the model, as `zero` says."""
    zero: Annotated[ZeroStage, CONTINUES] = 3
    """What `shard` ranks share (ZeRO, Rajbhandari et al. 2020): 1 the optimizer's state, 2 gradients too, 3 parameters
    too."""
    tensor: Annotated[int, Range(least=1), CONTINUES] = 1
    """Ranks that share every matrix product (Megatron-LM); must divide the key and value heads."""
    sequence: Annotated[bool, CONTINUES] = True
    """Whether `tensor` ranks also share what lies between the products, by places of the row (Korthikanti et al.
    2022)."""
    context: Annotated[int, Range(least=1), CONTINUES] = 1
    """Ranks that share every row, by its places."""
    context_method: Annotated[ContextKind, CONTINUES] = "ring"
    """How `context` ranks attend: keys and values go round (`ring`), or heads are exchanged for places (`ulysses`)."""
    pipeline: Annotated[int, Range(least=1), CONTINUES] = 1
    """Ranks that share the layers."""
    schedule: Annotated[ScheduleKind, CONTINUES] = "1f1b"
    """Order of the microbatches in a pipeline."""
    chunks: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Stages of each pipeline rank. Not set: 2 for `interleaved`, else 1."""
    recompute: Annotated[Recompute, CONTINUES] = "none"
    """What is computed again in the backward pass instead of kept: nothing, the inside of `attention`, `full` blocks,
    or as many blocks as `plan.memory_bytes` asks for (`auto`, planned anew for every length of row)."""
    saved_activations: Annotated[Activations, CONTINUES] = "whole"
    """How blocks save activations for the backward pass: as they are, with one bit per mask element (`packed`; the same
    gradients), or also with one byte per number of the inputs of linear layers, norms and activation functions
    (`8-bit`; gradients within 1 %). Blocks that `recompute` computes again keep their input as it is."""
    partition_activations: Annotated[bool, CONTINUES] = False
    """Whether `tensor` ranks share what `recompute` keeps (ZeRO-R)."""
    offload: Annotated[tuple[Offload, ...], CONTINUES] = ()
    """What lies in the host's memory while it is not used."""
    offload_path: Annotated[str, CONTINUES] = ""
    """A folder on a fast disk that takes it instead of the host's memory."""
    exact: Annotated[bool, CONTINUES] = False
    """Whether any power of two of data ranks gives the same bits. Price: gradients of every microbatch are reduced by
    themselves."""
    balance: Annotated[bool, CONTINUES] = False
    """Whether rows are dealt to data ranks by the cost of their attention, for packed documents of uneven length. Wins
    where attention leaves out pairs of different documents; one that masks them takes as long for every row."""
    resplit: Annotated[bool, CONTINUES] = False
    """Whether the layers of a pipeline are dealt anew by measured times when the run continues. Without, it is only
    said that they should be."""
    devices: Annotated[int, Range(least=1), CONTINUES] = 1
    """GPUs that one process drives, a copy of the model on each; with a CPU, threads. Processes (`--nproc`) are quicker
    and do the rest of this section too."""
    bucket_bytes: Annotated[int, Range(least=0), CONTINUES] = 25 << 20
    """Bucket size of gradient reductions, which overlap with the backward pass: a bucket is sent when it has reached
    this size. 0 sends each gradient by itself."""
    gradient_compression: Annotated[Compression, CONTINUES] = "none"
    """How gradients travel between replicas: as they are, rounded, or as low-rank factors (Vogels et al. 2019)."""
    powersgd_rank: Annotated[int, Range(least=1), CONTINUES] = 4
    """Rank of the factors of `powersgd`."""
    backend: Annotated[Backend, CONTINUES] = "auto"
    """Who communicates: NCCL for GPUs and gloo for CPUs, or `mpi` under `mpirun`."""
