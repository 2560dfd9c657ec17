"""Who takes part in benchmarks/nccl.py: our data parallelism, ZeRO-3 and pipeline, and what torch has for the same.

All train the same decoder of ours with the same compiled blocks, attention kernel, loss, microbatches, autocast,
clipping and torch's fused AdamW. Only what brings the ranks together differs:

- `ddp`: ours against `DistributedDataParallel`; float32 weights under autocast, gradients summed in float32. The peer
  has `gradient_as_bucket_view`, its own bucket size (ours has the same, 25 MiB) and `static_graph` where a step has one
  microbatch; with several, all but the last are without reduction (`no_sync`).
- `zero3`: ours in `bf16-pure` against `fully_shard` with `MixedPrecisionPolicy(bfloat16, reduce_dtype=float32)`, which
  do the same: float32 shards, bfloat16 weights gathered, gradients reduced in float32. Every block is a unit and frees
  its weights after the forward pass; the root keeps its own until the backward pass, which is `fully_shard`'s default.
- `1f1b`: ours against `Schedule1F1B`; float32 weights under autocast, hidden states travel as float32. The head is not
  tied to the embedding, for which `torch.distributed.pipelining` has no means. The peer is told the shapes beforehand
  and divides the loss itself (`scale_grads=False`): it has nothing else to do in a step.

Peers do not sum their loss over ranks; ours does in every step, together with the gradient's norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropewalk.load.batch import Batch
from ropewalk.model.attend import Attend, Kernel, attend_for
from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.loss import weighted_loss
from ropewalk.model.sizes import size_of
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.apply import apply
from ropewalk.parallel.kernels.kernel_choice import compile_stage
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.precision import autocast
from ropewalk.plan.plan import Plan

PEERS = {"ddp": "DistributedDataParallel", "zero3": "fully_shard", "1f1b": "Schedule1F1B"}
RATE, CLIP = 1e-4, 1.0
ADAM: dict[str, Any] = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}

Step = Callable[[], Tensor]
"""Makes a step and returns this rank's part of the loss, without waiting for the device; see `Contender.loss`."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both contenders of a case do, on one of the ranks."""

    case: str
    size: str
    rank: int
    ranks: int
    rows: int
    """Of a step, over all ranks."""
    microbatches: int
    """Of a step of one rank."""
    compiled: bool
    device: torch.device

    @property
    def spec(self) -> Spec:
        size = SMALL if self.size == "small" else size_of(self.size)
        model = dataclasses.replace(size.model, tie_embeddings=False) if self.case == "1f1b" else size.model
        return resolve(model, vocabulary=size.vocabulary, sequence_length=size.sequence_length)

    @property
    def plan(self) -> Plan:
        share = 1 if self.case == "1f1b" else self.ranks
        layers, each = range(self.spec.layers), -(-self.spec.layers // self.ranks)
        degrees: dict[str, Any] = {
            "ddp": {"replicate": self.ranks},
            "zero3": {"shard": self.ranks, "zero": 3},
            "1f1b": {
                "pipeline": self.ranks,
                "stages": tuple(tuple(layers[first : first + each]) for first in range(0, len(layers), each)),
            },
        }[self.case]
        return Plan(
            device="cuda" if self.device.type == "cuda" else "cpu",
            precision="bf16-pure" if self.case == "zero3" else "bf16",
            batch_size=self.rows,
            microbatch_size=self.rows // share // self.microbatches,
            compile=self.compiled,
            tuning="off",  # the peer has torch's matmuls
            **degrees,
        )

    def batch(self) -> Batch:
        """This rank's rows, on its device: of a pipeline all of them."""
        spec = self.spec
        draw = torch.Generator().manual_seed(0)
        rows = torch.randint(0, spec.vocabulary, (self.rows, spec.sequence_length + 1), generator=draw)
        whole = Batch.of_rows(rows)
        return (whole if self.case == "1f1b" else whole.strided(self.rank, self.ranks)).to(self.device)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One that takes part."""

    step: Step
    loss: Callable[[Tensor], float]
    """The loss of the global batch, of what a step returned. All ranks must call."""
    kernel: Kernel | None = None
    """The attention kernel that ours chose, for the peer to have the same."""


def ours(work: Work) -> Contender:
    plan, batch = work.plan, work.batch()
    with torch.device("meta"):
        model = Decoder(work.spec)
    executor = apply(
        plan,
        model,
        Mesh(plan, work.rank),
        lambda parameters, cuts: torch.optim.AdamW(list(parameters.values()), **ADAM),
        device=work.device,
        clip_norm=CLIP,
    )
    chosen = [contest.winner for contest in executor.contests if contest.what == "attention"]
    return Contender(
        step=lambda: executor.step(batch, lr=RATE).loss,
        loss=lambda loss: loss.item(),
        kernel=chosen[0] if chosen else None,  # type: ignore[arg-type]
    )


def peer(work: Work, kernel: Kernel | None) -> Contender:
    return {"ddp": _ddp, "zero3": _fsdp, "1f1b": _pipelining}[work.case](work, attend_for(work.spec, kernel=kernel))


def _ddp(work: Work, attend: Attend) -> Contender:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        _WithLoss(_whole(work), attend),
        device_ids=[work.device.index] if work.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=work.microbatches == 1,
    )
    return _loop(work, model, unreduced=model.no_sync)


def _fsdp(work: Work, attend: Attend) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(work.device.type, (work.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _WithLoss(_whole(work), attend)
    for block in model.decoder.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # Gradients are reduced in every microbatch, as ours are, so that they are never held whole.
    return _loop(work, model, unreduced=contextlib.nullcontext)


def _loop(work: Work, model: nn.Module, *, unreduced: Callable[[], Any]) -> Contender:
    """Steps of a data-parallel wrapper whose gradients are means over ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    pieces = [work.batch().strided(first, work.microbatches) for first in range(work.microbatches)]
    precision, count = work.plan.precision, work.microbatches

    def step() -> Tensor:
        total = torch.zeros((), device=work.device)
        for number, piece in enumerate(pieces):
            with unreduced() if number < count - 1 else contextlib.nullcontext():
                with autocast(precision, work.device):
                    loss = model(piece.tokens, piece.targets, piece.weight, piece.positions)
                loss = loss / (count * piece.targets.numel())
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    def mean(loss: Tensor) -> float:
        dist.all_reduce(loss)
        return loss.item() / work.ranks

    return Contender(step=step, loss=mean)


def _pipelining(work: Work, attend: Attend) -> Contender:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    plan, spec, whole = work.plan, work.spec, _initial(work)
    first, last = work.rank == 0, work.rank == work.ranks - 1
    with torch.device("meta"):
        stage = Decoder(spec, layers=plan.stages[work.rank], first=first, last=last)
    stage = stage.to_empty(device=work.device)
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(values[name])
    del whole, values
    if work.compiled:
        compile_stage(stage)
    batch, rows = work.batch(), plan.microbatch_size
    module = _Stage(stage, attend, batch.positions[:rows])
    total = batch.targets.numel()

    def loss_of(hidden_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        weights_N = torch.ones(targets_BT.numel(), device=work.device)
        return weighted_loss(hidden_BTC.flatten(0, 1), stage.head_weight, targets_BT.flatten(), weights_N) / total

    group = dist.new_group(list(range(work.ranks)))
    # NCCL makes a communicator at its first use, by all its ranks; the first messages are of two of them.
    dist.all_reduce(torch.zeros(1, device=work.device), group=group)
    hidden = torch.empty(rows, spec.sequence_length, spec.width, device="meta", requires_grad=True)
    runner = Schedule1F1B(
        PipelineStage(
            module,
            work.rank,
            work.ranks,
            work.device,
            input_args=(batch.tokens[:rows].to("meta"),) if first else (hidden,),
            output_args=(hidden,),
            group=group,
        ),
        n_microbatches=work.microbatches,
        loss_fn=loss_of,
        scale_grads=False,
    )
    # Without it the last stage joins its hidden states, which nobody wants; not in every version of torch.
    lean = {"return_outputs": False} if "return_outputs" in inspect.signature(runner.step).parameters else {}
    parameters = list(stage.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAM)

    def step() -> Tensor:
        losses: list[Tensor] = []
        with autocast(plan.precision, work.device):
            if first:
                runner.step(batch.tokens, **lean)
            elif last:
                runner.step(target=batch.targets, losses=losses, **lean)
            else:
                runner.step(**lean)
        # The norm over all stages, as torchtitan does it.
        square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=work.device)

    def of_last(loss: Tensor) -> float:
        dist.all_reduce(loss)
        return loss.item()

    return Contender(step=step, loss=of_last)


def _initial(work: Work) -> Decoder:
    return build(work.spec, seed=0, device=work.device)


def _whole(work: Work) -> Decoder:
    model = _initial(work)
    if work.compiled:
        compile_stage(model)
    return model


class _WithLoss(nn.Module):
    """The summed loss of a microbatch: wrappers of torch want to see a forward that uses all parameters."""

    def __init__(self, decoder: Decoder, attend: Attend) -> None:
        super().__init__()
        self.decoder, self._attend = decoder, attend

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, weight_BT: Tensor, positions_BT: Tensor) -> Tensor:
        hidden_BTC = self.decoder(tokens_BT, positions_BT=positions_BT, attend=self._attend)
        return weighted_loss(
            hidden_BTC.flatten(0, 1), self.decoder.head_weight, targets_BT.flatten(), weight_BT.flatten()
        )


class _Stage(nn.Module):
    """Hidden states of one stage, as `PipelineStage` calls it."""

    def __init__(self, decoder: Decoder, attend: Attend, positions_BT: Tensor) -> None:
        super().__init__()
        self.decoder, self._attend, self._positions_BT = decoder, attend, positions_BT

    def forward(self, x: Tensor) -> Tensor:
        hidden_BTC: Tensor = self.decoder(x, positions_BT=self._positions_BT, attend=self._attend)
        return hidden_BTC


SMALL = dataclasses.replace(
    size_of("350M"),
    model=Model(
        layers=4, width=128, heads=4, mlp="gelu-tanh", norm="layer", bias=True, position="learned", tie_embeddings=True
    ),
    vocabulary=512,
    sequence_length=64,
)
"""350M with fewer and narrower layers, for CPUs."""
