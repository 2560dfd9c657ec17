"""Derives the spec of a larger model for growth from a smaller one. No torch.

Only sizes grow; other settings must stay the same for the weights to keep their meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from ropewalk.base.errors import UserError
from ropewalk.config.schema import Range

from ..spec import Spec
from ..trainable import with_lora


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the larger model; what is not set stays, or follows from the width."""

    layers: Annotated[int, Range(least=1)] | None = None
    """Blocks."""
    width: Annotated[int, Range(least=8)] | None = None
    """Features between blocks: a multiple of the smaller model's."""
    heads: Annotated[int, Range(least=1)] | None = None
    """Query heads. Not set: as many more as the width grows, since the size of a head is kept."""
    kv_heads: Annotated[int, Range(least=1)] | None = None
    """Key and value heads. Not set: they grow as the query heads do."""
    mlp_width: Annotated[int, Range(least=8)] | None = None
    """Features inside the feed-forward part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What `ropewalk model grow` takes as overrides."""

    model: Sizes = field(default_factory=Sizes)
    """Sizes of the larger model."""


def larger(spec: Spec, sizes: Sizes) -> Spec:
    """The spec with the requested sizes, without adapters; a UserError lists every reason why the weights cannot be
    reused."""
    spec = with_lora(spec, None)
    times = (sizes.width or spec.width) // spec.width
    grown = dataclasses.replace(
        spec,
        layers=sizes.layers or spec.layers,
        width=sizes.width or spec.width,
        heads=sizes.heads or spec.heads * times,
        kv_heads=sizes.kv_heads or spec.kv_heads * times,
        mlp_width=sizes.mlp_width or spec.mlp_width,
    )
    problems = list(_problems(spec, grown)) if spec.kind == "decoder" else [f"`{spec.kind}` is no decoder"]
    if problems:
        raise UserError("\n".join(problems))
    return grown


def _problems(spec: Spec, grown: Spec) -> Iterator[str]:
    for name in ("layers", "width", "heads", "kv_heads", "mlp_width"):
        before, after = getattr(spec, name), getattr(grown, name)
        if after < before:
            yield f"`model.{name}`: {after} is less than the {before} of the checkpoint; models only grow"
    if grown == spec:
        yield "nothing grows; give a size, e.g. `model.layers=8`"
    if grown.width % spec.width:
        yield (
            f"`model.width`: {grown.width} is no multiple of {spec.width}; only whole copies of the features leave "
            "the mean and the root mean square of the norms as they are"
        )
    elif grown.heads * spec.width != spec.heads * grown.width:
        wanted = spec.heads * grown.width // spec.width
        yield f"`model.heads`: {grown.heads} would change the size of a head; width {grown.width} has {wanted} heads"
    elif not _is_whole(spec, grown):
        yield (
            f"`model.kv_heads`: {grown.kv_heads} for {grown.heads} heads is no copy of {spec.kv_heads} for "
            f"{spec.heads}; choose {spec.kv_heads} or {spec.kv_heads * grown.heads // spec.heads}"
        )
    if grown.width != spec.width:
        yield from _width_problems(spec)


def _is_whole(spec: Spec, grown: Spec) -> bool:
    """Whether groups are copied whole, and so are the queries inside a group."""
    if grown.kv_heads % spec.kv_heads or grown.heads % grown.kv_heads:
        return False
    return (grown.heads // grown.kv_heads) % (spec.heads // spec.kv_heads) == 0


def _width_problems(spec: Spec) -> Iterator[str]:
    if spec.position in ("alibi", "sinusoidal"):
        yield f"`model.width`: `{spec.position}` positions are others at another width; grow layers or mlp_width"
    if ":" in spec.norm + spec.position:
        yield "`model.width`: what a norm or position of your own computes at another width is not known"
    if spec.tie_embeddings and spec.norm == "none":
        yield (
            "`model.width`: a tied head would give larger logits, and without norms nothing can take that back; "
            "grow layers or mlp_width"
        )
