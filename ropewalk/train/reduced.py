"""Reduced models for `--verify` when the whole model does not fit: fewer layers, then fewer heads of the same size.

The plan keeps its degrees, stages and settings, so the same collectives run. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ropewalk.model.spec import Spec
from ropewalk.plan.layout import problems
from ropewalk.plan.plan import PhasePlan, Plan
from ropewalk.plan.stage_split import split_layers

LAYERS_PER_STAGE = 2
"""Of a reduced model, if they fit: two consecutive layers in one stage are verified too."""
LEAST_VOCABULARY = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A model to verify under the plan of its phase."""

    planned: PhasePlan
    compared: str
    """The compared part of the model, in words."""


def candidates(planned: PhasePlan) -> Iterator[Candidate]:
    """The whole model, then ever smaller ones that the plan can shard."""
    yield Candidate(planned=planned, compared="the whole model")
    spec, stages = planned.spec, planned.plan.pipeline * planned.plan.chunks
    counts = [per * stages for per in range(LAYERS_PER_STAGE, 0, -1) if per * stages < spec.layers]
    for layers in counts:
        fewer = dataclasses.replace(spec, layers=layers)
        yield Candidate(planned=_planned(planned, fewer), compared=f"{layers} of {spec.layers} layers")
    fewest = dataclasses.replace(spec, layers=min([spec.layers, *counts]))
    last, share = fewest, 2
    while (narrow := narrower(fewest, planned.plan, share)) != last:
        yield Candidate(planned=_planned(planned, narrow), compared=_words(narrow, spec))
        last, share = narrow, 2 * share


def narrower(spec: Spec, plan: Plan, share: int) -> Spec:
    """A model with about 1/`share` of the heads, MLP width and vocabulary of `spec` that the plan can shard; the head
    size is unchanged."""
    unit = plan.tensor
    for kv_heads in range(max(unit, spec.kv_heads // share // unit * unit), spec.kv_heads + 1, unit):
        heads = kv_heads * (spec.heads // spec.kv_heads)
        for hidden in _multiples(spec.mlp_width, 16 * unit, share):
            found = dataclasses.replace(
                spec,
                kv_heads=kv_heads,
                heads=heads,
                width=max(1, spec.width * heads // spec.heads),
                mlp_width=hidden,
                vocabulary=min(spec.vocabulary, max(LEAST_VOCABULARY, spec.vocabulary // share)),
            )
            if not any(problems(_relaid(plan, found), found)):
                return found
    return spec


def _multiples(whole: int, unit: int, share: int) -> Iterator[int]:
    """Multiples of `unit` from `whole` / `share` up, then `whole`."""
    yield from range(max(unit, whole // share // unit * unit), whole, unit)
    yield whole


def _planned(planned: PhasePlan, spec: Spec) -> PhasePlan:
    trained = planned.trained
    if trained is not None:
        # The first half of the layers maps to the first layers of the whole model, the rest to its last ones.
        first = -(-spec.layers // 2)
        moved = planned.spec.layers - spec.layers
        names = {name: _name_in_whole(name, first, moved) for name in spec.shapes()}
        # If no trained parameter maps, all are trained.
        trained = tuple(name for name, there in names.items() if there in trained) or None
    return dataclasses.replace(planned, spec=spec, plan=_relaid(planned.plan, spec), trained=trained)


def _name_in_whole(name: str, first: int, moved: int) -> str:
    words = name.split(".")
    if words[0] == "blocks" and int(words[1]) >= first:
        words[1] = str(int(words[1]) + moved)
    return ".".join(words)


def _relaid(plan: Plan, spec: Spec) -> Plan:
    """`plan` with the layers of `spec` assigned to its pipeline stages."""
    if plan.pipeline == 1 or sum(map(len, plan.stages)) == spec.layers:
        return plan
    return dataclasses.replace(plan, stages=split_layers(spec, plan.pipeline * plan.chunks))


def _words(narrow: Spec, whole: Spec) -> str:
    sizes = (
        f"{narrow.layers} of {whole.layers} layers",
        f"{narrow.heads} of {whole.heads} heads of {whole.head_size}",
        f"width {narrow.width} of {whole.width}",
        f"hidden {narrow.mlp_width} of {whole.mlp_width}",
        f"vocabulary {narrow.vocabulary} of {whole.vocabulary}",
    )
    return "; ".join((sizes[0], ", ".join(sizes[1:])))
