"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): given to a model, trained beside its weights, merged into them.

`model/modules.py` computes with them, `model/init_laws.py` says how they start. Importing this needs no torch, so that
plans can name what is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .config import Lora
from .spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


def with_lora(spec: Spec, lora: Lora | None) -> Spec:
    """The spec with adapters as asked for, or with none."""
    rank, rest = (lora.rank, lora) if lora else (0, Lora())
    return dataclasses.replace(spec, lora_rank=rank, lora_alpha=rest.alpha, lora_targets=rest.targets)


def adapter_names(spec: Spec) -> tuple[str, ...]:
    """The adapters among the spec's parameters: what is trained when there are some."""
    return tuple(name for name in spec.shapes() if name.endswith((".lora_a", ".lora_b")))


def adapted(weights: Mapping[str, Tensor], spec: Spec, *, seed: int) -> dict[str, Tensor]:
    """The weights of a model without adapters and fresh ones as `spec` has them: together they compute what the weights
    did. Adapters have the type and the device of the matrices that they stand beside."""
    from .init import initial_value  # the only part that needs torch

    assert not set(adapter_names(spec)) & weights.keys(), "these weights have adapters; merge them first"
    shapes, found = spec.shapes(), dict(weights)
    for name in adapter_names(spec):
        beside = weights[f"{name.rpartition('.')[0]}.weight"]
        found[name] = initial_value(name, shapes[name], spec, seed=seed).to(beside)
    return {name: found[name] for name in shapes}


def merged(weights: Mapping[str, Tensor], spec: Spec) -> tuple[dict[str, Tensor], Spec]:
    """The same function without adapters: W + alpha / rank x B A in the place of each W; and its spec.

    Computed in float64 and rounded once, to the type of W.
    """
    plain = with_lora(spec, None)
    found = {name: weights[name] for name in plain.shapes()}
    for part in {name.rpartition(".")[0] for name in adapter_names(spec)}:
        weight, a, b = (weights[f"{part}.{kind}"] for kind in ("weight", "lora_a", "lora_b"))
        found[f"{part}.weight"] = with_adapter(weight, a, b, spec)
    return found, plain


def with_adapter(weight: Tensor, a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """W + alpha / rank x B A of one matrix, or of a part of it: with the columns of A and the rows of B that it has."""
    added = b.double() @ a.double() * (spec.lora_alpha / spec.lora_rank)
    return (weight.double() + added).to(weight)
