"""Forecast memory bounds measured memory, and not by much."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model import loss as loss_module
from ropewalk.model.attend import attend_for
from ropewalk.model.config import Lora
from ropewalk.model.decoder import build
from ropewalk.model.dropout import Dropout
from ropewalk.model.loss import token_losses, weighted_loss
from ropewalk.model.sizes import size_of
from ropewalk.model.spec import Spec, resolve
from ropewalk.model.trainable import trained_names, with_lora
from ropewalk.parallel import tensor
from ropewalk.parallel.apply import apply
from ropewalk.plan import forecast
from ropewalk.plan.config import Recompute
from ropewalk.plan.forecast import memory
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from ropewalk.train.optim.table import OPTIMIZERS
from tests.tiny import random_batch, small_spec

SHAPES: dict[str, dict[str, Any]] = {
    "default": {"vocabulary": 100, "sequence_length": 64},
    "large vocabulary": {"vocabulary": 2000, "sequence_length": 64},
    "one key head": {"kv_heads": 1, "vocabulary": 300, "sequence_length": 32},
    "GPT-2": {"norm": "layer", "mlp": "gelu", "position": "learned", "vocabulary": 200, "sequence_length": 64},
    "GPT-2 with grouped heads": {"norm": "layer", "mlp": "gelu", "position": "learned", "kv_heads": 2},
    "untied": {"tie_embeddings": False, "norm": "layer", "vocabulary": 500},
    "ALiBi in bands": {
        "position": "alibi",
        "window": 9,
        "documents": "separate",
        "vocabulary": 200,
        "sequence_length": 64,
    },
    "all norms": {"norm_position": "both", "qk_norm": True, "bias": True, "vocabulary": 200, "sequence_length": 64},
    "post, dropped": {
        "norm_position": "post",
        "mlp": "relu2",
        "dropout": 0.1,
        "vocabulary": 200,
        "sequence_length": 64,
    },
    "no norm": {"norm": "none", "mlp": "geglu", "position": "none", "vocabulary": 200, "sequence_length": 64},
    "deep, few tokens": {"layers": 5, "vocabulary": 1000, "sequence_length": 8},
}
Precision = Literal["fp32", "bf16"]
MASKED = {"position": "alibi", "kv_heads": 2, "window": 64}


def spec_of(name: str) -> Spec:
    return small_spec(**{"width": 64, "mlp_width": 192, **SHAPES[name]})


def saved_bytes(spec: Spec, batch: Batch, precision: Precision, device: str = "cpu") -> int:
    """Bytes of all storages that autograd keeps for the backward of the loss, those of the weights left out."""
    model = build(spec, seed=0, device=device)
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        attend = attend_for(spec, documents_BT=batch.documents)
        dropout = Dropout(spec.dropout, torch.zeros((), dtype=torch.int64), torch.arange(len(batch)))
        hidden = model(
            batch.tokens, positions_BT=batch.positions, attend=attend, dropout=dropout if spec.dropout else None
        )
        weighted_loss(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten(), batch.weight.flatten())
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_forecast_activations_bound_what_autograd_keeps_within_5_percent(
    name: str, rows: int, precision: Precision
) -> None:
    spec = spec_of(name)
    measured = saved_bytes(spec, random_batch(spec, rows=rows), precision)
    # 5 %: the forecast counts the whole batch, of which autograd keeps the tokens and targets.
    assert measured <= memory(spec, rows=rows, precision=precision).activations <= 1.05 * measured


@pytest.mark.parametrize(
    ("size", "rows", "optimizer", "peak"),
    [("1.3B", 16, "adamw", 74.35e9), ("7B", 2, "adamw-8bit", 91.6e9), ("7B", 4, "adamw-8bit", 126.9e9)],
)
def test_forecast_is_near_the_peaks_of_steps_on_a_gpu(size: str, rows: int, optimizer: Any, peak: float) -> None:
    """Measured on an H200, compiled, in `bf16-pure`, one microbatch a step (docs/benchmarks.md, train on an H200)."""
    chosen = size_of(size)
    spec = resolve(chosen.model, vocabulary=chosen.vocabulary, sequence_length=chosen.sequence_length)
    needed = memory(
        spec, rows=rows, precision="bf16-pure", optimizer=OPTIMIZERS[optimizer].costs, device="cuda", accumulates=False
    ).total
    assert peak <= needed <= 1.03 * peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_forecast_bounds_the_peak_of_a_step_within_a_half(name: str, precision: Precision) -> None:
    spec, rows = spec_of(name), 4
    peak = peak_of_a_step(spec, rows=rows, precision=precision)
    needed = memory(spec, rows=rows, precision=precision)
    # Weights and moments stand before the step. Gradients of a block overlap less than the forecast assumes.
    forecast_bytes = needed.gradients + needed.activations + needed.workspace
    assert peak <= forecast_bytes <= 1.5 * peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("frozen", [("embedding",), ("blocks.0-1", "*norm*"), ()], ids=str)
def test_forecast_bounds_the_peak_with_frozen_parts_or_adapters(frozen: tuple[str, ...], precision: Precision) -> None:
    rows, spec = 4, spec_of("default")
    spec = spec if frozen else with_lora(spec, Lora(rank=4))
    trained = trained_names(spec, frozen)
    peak = peak_of_a_step(spec, rows=rows, precision=precision, trained=trained)
    needed = memory(spec, rows=rows, precision=precision, trained=trained)
    forecast_bytes = needed.gradients + needed.activations + needed.workspace
    # The workspace is that of a step in which everything is trained.
    assert peak <= forecast_bytes <= 2.5 * peak


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Attention in tiles has some megabytes for each thread (model/cpu_attention.py): much for the models here, nothing
    for those whose memory one asks about."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak_of_a_step(
    spec: Spec,
    *,
    rows: int,
    precision: Any,
    kind: str = "adamw",
    trained: tuple[str, ...] | None = None,
    recompute: Recompute = "none",
) -> int:
    """Bytes that a second step adds at its fullest moment: weights and moments stand before."""
    plan = Plan(device="cpu", precision=precision, batch_size=2 * rows, microbatch_size=rows, recompute=recompute)
    settings = Optimizer(kind=kind)
    executor = apply(
        plan,
        build(spec, seed=0),
        None,
        lambda p, _: make_optimizer(p, settings, spec=spec),
        clip_norm=1.0,
        trained=trained,
    )
    batch = random_batch(spec, rows=2 * rows)
    executor.step(batch, lr=1e-3)
    with torch.profiler.profile(profile_memory=True) as profile:
        executor.step(batch, lr=1e-3)
    peak = present = 0
    changes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        present += event.nbytes()
        peak = max(peak, present)
    return peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["attention", "full"])
@pytest.mark.parametrize("name", ["default", "GPT-2", "ALiBi in bands", "post, dropped"])
def test_forecast_bounds_the_peak_when_blocks_are_computed_again(
    name: str, recompute: Literal["attention", "full"], precision: Precision
) -> None:
    spec, rows = dataclasses.replace(spec_of(name), layers=8), 4
    peak = peak_of_a_step(spec, rows=rows, precision=precision, recompute=recompute)
    needed = memory(spec, rows=rows, precision=precision, recompute=recompute)
    forecast_bytes = needed.gradients + needed.activations + needed.workspace
    assert peak <= forecast_bytes <= 1.5 * peak


@pytest.mark.parametrize("name", ["default", "GPT-2", "deep, few tokens"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_forecast_bounds_the_peak_under_every_optimizer(kind: str, name: str) -> None:
    spec, rows = spec_of(name), 4
    peak = peak_of_a_step(spec, rows=rows, precision="fp32", kind=kind)
    needed = memory(spec, rows=rows, precision="fp32", optimizer=OPTIMIZERS[kind].costs)
    forecast_bytes = needed.gradients + needed.activations + needed.workspace
    assert peak <= forecast_bytes <= 1.5 * peak


@pytest.mark.parametrize("name", ["default", "large vocabulary", "GPT-2", "deep, few tokens"])
@pytest.mark.parametrize("precision", ["bf16-pure", "fp16"])
def test_forecast_bounds_the_peak_in_other_precisions(precision: Any, name: str) -> None:
    spec, rows = spec_of(name), 4
    needed = memory(spec, rows=rows, precision=precision)
    forecast_bytes = needed.gradients + needed.activations + needed.workspace
    peak = peak_of_a_step(spec, rows=rows, precision=precision)
    assert peak <= forecast_bytes <= 2 * peak


def test_many_logits_are_counted_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(vocabulary=5000, sequence_length=64)
    whole = memory(spec, rows=4, precision="fp32")
    monkeypatch.setattr(forecast, "LOGIT_BYTES", 64 * 5000 * 4)
    chunked = memory(spec, rows=4, precision="fp32")
    assert whole.activations == chunked.activations
    assert chunked.workspace < whole.workspace


def test_the_chunk_is_the_one_of_the_loss() -> None:
    assert forecast.LOGIT_BYTES == loss_module.LOGIT_BYTES
    assert forecast.GPU_LOGIT_BYTES == loss_module.GPU_LOGIT_BYTES
    assert forecast.SPLIT_LOGIT_BYTES == tensor.SPLIT_LOGIT_BYTES


def test_weights_gradients_and_moments_are_counted_exactly() -> None:
    spec = small_spec()
    model = build(spec, seed=0)
    optimizer = make_optimizer(dict(model.named_parameters()), Optimizer())
    token_losses(model(torch.zeros(1, 4, dtype=torch.long)).flatten(0, 1), model.head_weight, torch.zeros(4).long())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    needed = memory(spec, rows=1, precision="fp32")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert (needed.weights, needed.gradients, needed.optimizer) == (weights, weights, sum(t.nbytes for t in moments))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("shape", "precision"),
    [
        ({}, "fp32"),
        ({}, "bf16"),
        ({"norm": "layer", "mlp": "gelu", "position": "learned"}, "fp32"),
        ({"norm": "layer", "mlp": "gelu", "position": "learned"}, "bf16"),
        ({"kv_heads": 2}, "fp32"),
        ({"kv_heads": 2}, "bf16"),
        (MASKED, "bf16"),
        (MASKED, "fp32"),
    ],
)
def test_forecast_bounds_the_peak_on_a_gpu(shape: dict[str, Any], precision: Precision) -> None:
    settings = {"layers": 6, "width": 512, "heads": 8, "mlp_width": 1536, "vocabulary": 8192, "sequence_length": 512}
    spec, rows = small_spec(**{**settings, **shape}), 8
    gc.collect()
    before = torch.cuda.memory_allocated()
    plan = Plan(device="cuda", precision=precision, batch_size=2 * rows, microbatch_size=rows)
    executor = apply(
        plan, build(spec, seed=0, device="cuda"), None, lambda p, _: make_optimizer(p, Optimizer()), clip_norm=1.0
    )
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        executor.step(random_batch(spec, rows=2 * rows), lr=1e-3)
    peak = torch.cuda.max_memory_allocated() - before
    needed = memory(spec, rows=rows, precision=precision, device="cuda").total
    # 128 MiB: the workspaces of cuBLAS, up to 102 MB on an H200 whatever the model.
    assert peak - (128 << 20) <= needed <= 1.1 * peak
