"""Initializes parameters, each from a random stream seeded by (seed, name).

Initial values are therefore independent of device, sharding and construction order. The distribution is the law's
(model/init_laws.py), which applies to the parts of fused matrices: `unfused` splits these as declared, `fused` is its
exact inverse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.base.seeds import seed_for

from .components import made
from .init_laws import INITS, Law, Matrix, adapter
from .sharding import Split, split_of, whole_name
from .spec import Spec

AHEAD_NUMEL = 1 << 30
"""Maximum number of values drawn ahead of use, unless one parameter has more: 4 GB."""


def initialize(model: nn.Module, spec: Spec, *, seed: int) -> None:
    """Fills all parameters of `model` in place; a pipeline stage gets the values of the whole model's layers."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, value in initial_values(shapes, spec, seed=seed):
            parameters[name].copy_(value)


def initial_values(shapes: Mapping[str, tuple[int, ...]], spec: Spec, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """`initial_value` of parameters of these unsharded shapes, in order. Draws in parallel: one core makes 170 M
    values per second, two 250 M (AMD EPYC)."""
    threads = torch.get_num_threads()
    ahead: deque[tuple[str, Future[Tensor]]] = deque()
    held = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="init") as pool:
        for name, shape in shapes.items():
            held += prod(shape)
            while ahead and (len(ahead) > threads or held > AHEAD_NUMEL):
                first, drawn = ahead.popleft()
                held -= prod(shapes[first])
                yield first, drawn.result()
            ahead.append((name, pool.submit(initial_value, name, shape, spec, seed=seed)))
        while ahead:
            first, drawn = ahead.popleft()
            yield first, drawn.result()


def initial_value(name: str, shape: tuple[int, ...], spec: Spec, *, seed: int) -> Tensor:
    """The unsharded initial value of one parameter, float32 on the CPU."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith((".bias", ".lora_b")):
        return torch.zeros(shape)
    source = whole_name(name, spec)
    generator = torch.Generator().manual_seed(seed_for(seed, "init", source))
    if name.endswith(".lora_a"):
        return torch.empty(shape).normal_(std=adapter(shape[1]).std, generator=generator)
    law: Law = made(INITS[spec.init], spec.init_settings)
    laws = [(rows, law(matrix, spec)) for rows, matrix in matrices(source, shape, spec)]
    (kind,) = {each.kind for _, each in laws}
    if kind == "normal":
        drawn = torch.empty(shape).normal_(generator=generator)
        scales = [each.std for _, each in laws]
    else:
        drawn = torch.empty(shape).uniform_(-1, 1, generator=generator)
        scales = [each.bound for _, each in laws]
    of_unit = torch.tensor(scales).repeat_interleave(torch.tensor([rows for rows, _ in laws]))
    return drawn.mul_(of_unit.repeat(shape[0] // len(of_unit)).unsqueeze(1))


def matrices(name: str, shape: tuple[int, ...], spec: Spec) -> list[tuple[int, Matrix]]:
    """Layout of one unit of a parameter: (rows, unfused matrix) for each part, in order."""
    layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
    split = split_of(name, spec)
    if split.parts:
        sized = [(part, rows, rows * split.units) for part, rows in split.parts]
    else:
        part = name.split(".")[-2]
        sized = [(part, shape[0], shape[0])]
    found: list[tuple[int, Matrix]] = []
    for part, rows, outputs in sized:
        named: Any = part
        found.append((rows, Matrix(part=named, layer=layer, inputs=shape[1], outputs=outputs)))
    return found


def part_names(name: str, spec: Spec) -> tuple[str, ...]:
    """Parts of the parameter `name`: ("query", "key", "value"), ("gate", "up"), or itself ("down")."""
    return tuple(part for part, _ in split_of(name, spec).parts) or (name.split(".")[-2],)


def unfused(fused: Tensor, split: Split) -> list[Tensor]:
    """Splits a fused weight or bias into its parts, rows in order; another parameter is its only part."""
    if not split.parts:
        return [fused]
    rows = [rows for _, rows in split.parts]
    units = fused.unflatten(0, (split.units, sum(rows)))
    return [part.flatten(0, 1) for part in units.split(rows, dim=1)]


def fused(parts: Sequence[Tensor], split: Split) -> Tensor:
    """The inverse of `unfused`."""
    if not split.parts:
        (alone,) = parts
        return alone
    units = [part.unflatten(0, (split.units, -1)) for part in parts]
    return torch.cat(units, dim=1).flatten(0, 1)
