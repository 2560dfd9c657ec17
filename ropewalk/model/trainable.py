"""Selects the trained parameters: only the low-rank adapters if there are any, minus those that a recipe freezes.

Adapters (Hu et al. 2021, arXiv 2106.09685) are added to a model, trained beside its weights, and merged into them.

    frozen = ["embedding", "blocks.0-3", "*norm*"]

A pattern in `frozen` is a module or parameter (`embedding`, `blocks.0`, `blocks.0.mlp`, `blocks.0.mlp.up.bias`), an
inclusive range of blocks (`blocks.0-3`, `blocks.0-3.attention`), or, with `*`, `?` or `[`, a shell pattern over full
names.

Imports no torch, so that plans can name the trained parameters.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ropewalk.base.errors import UserError

from .config import Lora
from .spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


def with_lora(spec: Spec, lora: Lora | None) -> Spec:
    """The spec with the requested adapters, or with none."""
    rank, rest = (lora.rank, lora) if lora else (0, Lora())
    return dataclasses.replace(spec, lora_rank=rank, lora_alpha=rest.alpha, lora_targets=rest.targets)


def adapter_names(spec: Spec) -> tuple[str, ...]:
    """Names of the spec's adapter parameters, which alone are trained if there are any."""
    return tuple(name for name in spec.shapes() if name.endswith((".lora_a", ".lora_b")))


def adapted(weights: Mapping[str, Tensor], spec: Spec, *, seed: int) -> dict[str, Tensor]:
    """Adds fresh adapters to the weights of a model without adapters, as in `spec`: the function is unchanged. Adapters
    have the dtype and device of their matrices."""
    from .init import initial_value  # needs torch

    assert not set(adapter_names(spec)) & weights.keys(), "these weights have adapters; merge them first"
    shapes, found = spec.shapes(), dict(weights)
    for name in adapter_names(spec):
        beside = weights[f"{name.rpartition('.')[0]}.weight"]
        found[name] = initial_value(name, shapes[name], spec, seed=seed).to(beside)
    return {name: found[name] for name in shapes}


def merged(weights: Mapping[str, Tensor], spec: Spec) -> tuple[dict[str, Tensor], Spec]:
    """Merges adapters: replaces each W by W + alpha / rank x B A; returns weights and spec of the same function.

    Computed in float64 and rounded once, to the dtype of W.
    """
    plain = with_lora(spec, None)
    found = {name: weights[name] for name in plain.shapes()}
    for part in {name.rpartition(".")[0] for name in adapter_names(spec)}:
        weight, a, b = (weights[f"{part}.{kind}"] for kind in ("weight", "lora_a", "lora_b"))
        found[f"{part}.weight"] = with_adapter(weight, a, b, spec)
    return found, plain


def with_adapter(weight: Tensor, a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """W + alpha / rank x B A of a matrix, or of a part of it with the matching columns of A and rows of B."""
    added = b.double() @ a.double() * (spec.lora_alpha / spec.lora_rank)
    return (weight.double() + added).to(weight)


def trained_names(spec: Spec, frozen: Sequence[str]) -> tuple[str, ...]:
    """The trained parameters, in the order of `spec.shapes()`: only adapters if there are any, minus those matched by
    a pattern of `frozen`.

    A UserError lists all patterns without a match, or says that no parameter is left to train.
    """
    names = tuple(spec.shapes())
    problems, still = [], set()
    for pattern in frozen:
        found, problem = _named(pattern, names, spec)
        still |= found
        problems += [f"`frozen`: {problem}"] if problem else []
    if problems:
        raise UserError("\n".join(problems))
    trained = tuple(name for name in adapter_names(spec) or names if name not in still)
    if not trained:
        what = "adapter" if spec.lora_rank else "parameter"
        raise UserError(f"`frozen`: after {_listed(frozen)} no {what} is left to train; remove a pattern")
    return trained


def _named(pattern: str, names: Sequence[str], spec: Spec) -> tuple[set[str], str]:
    """Parameters matched by the pattern, and its error if any."""
    found: set[str] = set()
    for single in _ranged(pattern):
        here = {name for name in names if _matches(name, single)}
        if not here:
            return set(), _unmatched(pattern, single, names, spec)
        found |= here
    return found, "" if found else f"`{pattern}` is a range that ends before it begins; turn it around"


def _ranged(pattern: str) -> Iterator[str]:
    """The pattern expanded to each block of its range, or itself."""
    match = re.fullmatch(r"blocks\.(\d+)-(\d+)(\..+)?", pattern)
    if not match:
        yield pattern
        return
    first, last, rest = match.groups(default="")
    yield from (f"blocks.{layer}{rest}" for layer in range(int(first), int(last) + 1))


def _matches(name: str, pattern: str) -> bool:
    if re.search(r"[*?\[]", pattern):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.")


def _unmatched(pattern: str, single: str, names: Sequence[str], spec: Spec) -> str:
    """Why `single`, one expansion of `pattern`, has no match, and what to write instead."""
    if single.split(".")[0] == "head" and spec.tie_embeddings:
        return f"`{pattern}` names nothing: the head shares the embedding's weights; freeze `embedding`"
    block = re.match(r"blocks\.(\d+)(\.|$)", single)
    if block and int(block[1]) >= spec.layers:
        return f"`{pattern}` names block {block[1]}; the model has blocks 0 to {spec.layers - 1}"
    near = difflib.get_close_matches(single, _candidates(names), n=3, cutoff=0.5)
    hint = f"did you mean {_listed(near)}?" if near else "`ropewalk model describe` lists the names"
    return f"`{pattern}` names no parameter; {hint}"


def _candidates(names: Sequence[str]) -> list[str]:
    """Suggestions: modules, names, and patterns for each word of a name."""
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        found |= dict.fromkeys(".".join(words[:count]) for count in range(1, len(words) + 1))
        found |= dict.fromkeys(f"*{word}*" for word in words if not word.isdigit())
    return list(found)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
