"""How each parameter may be split over devices: declarations only. `plan` chooses among them, `parallel` applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .spec import Spec

Role = Literal["column", "row", "vocabulary", "replicate"]


@dataclass(frozen=True, slots=True)
class Split:
    """One parameter's tensor split.

    `column` splits the outputs (dimension 0), `row` the inputs (dimension 1, partial sums are added), `vocabulary` the
    rows of the embedding or head, `replicate` not at all. Any cut of the dimension into equal parts of whole units is
    valid. The bias after a `row` matrix is replicated and joins after the partial sums. Of an adapter, the factor that
    meets the split dimension of its matrix is split as that is, the other one is replicated.
    """

    role: Role
    units: int = 1
    """Indivisible pieces along the split dimension; a tensor degree must divide it."""
    parts: tuple[tuple[str, int], ...] = ()
    """What one unit of a fused matrix holds, in order: (name, rows)."""
    partial_gradient: bool = False
    """Whether a replicated parameter meets only this rank's part of the features, so that its gradients add up over
    ranks: the norms of queries and keys, one factor of each adapter."""

    @property
    def dimension(self) -> int | None:
        return {"column": 0, "vocabulary": 0, "row": 1, "replicate": None}[self.role]


def splits(spec: Spec) -> dict[str, Split]:
    """The split of every parameter in `spec.shapes()`."""
    return {name: split_of(name, spec) for name in spec.shapes()}


def split_of(name: str, spec: Spec) -> Split:
    """The split of one parameter."""
    size = spec.head_size
    if name.endswith((".lora_a", ".lora_b")):
        return _adapter_split(name, spec)
    if name.endswith(("attention.qkv.weight", "attention.qkv.bias")):
        queries = spec.heads // spec.kv_heads * size
        return Split("column", spec.kv_heads, (("query", queries), ("key", size), ("value", size)))
    if name.endswith("attention.out.weight"):
        return Split("row", spec.kv_heads)
    if name.endswith(("query_norm.weight", "key_norm.weight")):
        return Split("replicate", partial_gradient=True)
    if name.endswith(("mlp.up.weight", "mlp.up.bias")):
        if spec.gated:
            chunk = spec.mlp_chunk
            return Split("column", spec.mlp_width // chunk, (("gate", chunk), ("up", chunk)))
        return Split("column", spec.mlp_width)
    if name.endswith("mlp.down.weight"):
        return Split("row", spec.mlp_width // spec.mlp_chunk if spec.gated else spec.mlp_width)
    if name in ("embedding.weight", "head.weight"):
        return Split("vocabulary", spec.vocabulary)
    return Split("replicate")


def whole_name(name: str, spec: Spec) -> str:
    """The parameter that `name` is in the whole model: the last stage of a pipeline has a head of its own also where
    the head is tied, and that is a copy of the embedding, no parameter by itself."""
    return "embedding.weight" if name == "head.weight" and spec.tie_embeddings else name


def _adapter_split(name: str, spec: Spec) -> Split:
    """W + B A: B has the outputs of W, A its inputs."""
    part, _, kind = name.rpartition(".")
    whole = split_of(f"{part}.weight", spec)
    shared = "lora_b" if whole.role == "column" else "lora_a"
    return whole if kind == shared else Split("replicate", partial_gradient=True)
