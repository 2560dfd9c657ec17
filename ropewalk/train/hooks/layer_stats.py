"""Per-layer statistics every n steps: norms of gradient, weight and update, and activation size.

All are reductions on the device, read once at the end of a measured step; other steps cost nothing. A measured step
holds one more copy of the trained weights, made after the backward pass has freed the activations: with 124 M
parameters and 16 sequences of 1024 tokens in bf16 on an H200 it takes 75.7 ms instead of 72.8 and no more memory.
Measurement does not change the run: weights are bitwise identical with and without.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ropewalk.parallel.executor import Executor
from ropewalk.parallel.labels import label
from ropewalk.parallel.state import Named

from .hook import Activity, Hook
from .layer_health import LayerFigures, Symptom, find_symptom

if TYPE_CHECKING:
    from ..training_run import TrainingRun

Figure = Literal["gradient", "weight", "update", "activation"]

PLACES = re.compile(r"norm|blocks\.\d+(\.(attention|mlp))?")
"""Modules whose output is measured, by name. The embedding is measured as the input of the first block, with positions
and dropout."""


class LayerStats(Hook):
    """Measures every `every_steps` steps (0: never), writes the event `layers` and warns of unhealthy layers."""

    def __init__(self, every_steps: int, *, scaled_loss: bool = False) -> None:
        self._every_steps, self._scaled_loss = every_steps, scaled_loss
        self._last: Symptom | None = None

    def during(self, run: TrainingRun, activity: Activity) -> contextlib.AbstractContextManager[None]:
        due = activity == "step" and self._every_steps and (run.step + 1) % self._every_steps == 0
        return self._measured(run) if due else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measured(self, run: TrainingRun) -> Iterator[None]:
        with measuring(run.executor) as measurement:
            yield
        with label("layers"):
            self._report(run, measurement.read())

    def _report(self, run: TrainingRun, layers: Sequence[LayerFigures]) -> None:
        step = run.step + 1
        run.events.write("layers", step=step, **columns(layers))
        symptom = find_symptom(layers, scaled_loss=self._scaled_loss)
        # A problem lasts many steps; it is reported once.
        if symptom and not symptom.same_trouble(self._last):
            run.warn(f"step {step}: {symptom}")
        self._last = symptom


def columns(layers: Sequence[LayerFigures]) -> dict[str, Any]:
    """The fields of the event `layers`: one list per statistic, in the order of `layers`, six significant digits."""
    figures = ("gradient", "weight", "update", "update_ratio", "activation")
    return {
        "layers": [layer.name for layer in layers],
        **{figure: [_short(getattr(layer, figure)) for layer in layers] for figure in figures},
    }


@contextlib.contextmanager
def measuring(executor: Executor) -> Iterator[Measurement]:
    """Measures the one step that the block runs with `executor`; read the result afterwards. A pipeline stage measures
    its own layers."""
    measurement = Measurement(executor)
    note = measurement.note_activation
    first = next(iter(executor.model.blocks.values()))
    handles = [_once(first.register_forward_pre_hook, functools.partial(note, "embedding"))]
    for name, module in executor.model.named_modules():
        if PLACES.fullmatch(name):
            handles.append(_once(module.register_forward_hook, functools.partial(note, name)))
    executor.hooks.on_gradients.append(measurement.note_gradients)
    try:
        yield measurement
        measurement.note_update()
    finally:
        executor.hooks.on_gradients.remove(measurement.note_gradients)
        for handle in handles:
            handle.remove()


class Measurement:
    """Statistics of one step; numbers stay on the device until `read`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._numbers: dict[tuple[Figure, str], Tensor] = {}
        """By statistic and name of a parameter or, for activations, of a module."""
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def note_activation(self, name: str, output: Tensor) -> None:
        """Records the RMS of a layer's output in the first microbatch."""
        wide = torch.promote_types(output.dtype, torch.float32)
        length = torch.linalg.vector_norm(output, dtype=wide)
        self._numbers["activation", name] = length / math.sqrt(output.numel())

    @torch.no_grad()
    def note_gradients(self, gradients: Named) -> None:
        """Records gradients before clipping and a copy of the weights before the update."""
        weights = self._executor.model_state()
        gradients = {name: gradient for name, gradient in gradients.items() if name in weights}
        self._before = {name: weights[name].local.clone() for name in gradients}
        self._note_norms("gradient", gradients)
        self._note_norms("weight", self._before)

    @torch.no_grad()
    def note_update(self) -> None:
        """Records the update from the weights after the step."""
        weights = self._executor.model_state()
        torch._foreach_sub_(list(self._before.values()), [weights[name].local for name in self._before])
        self._note_norms("update", self._before)
        self._before = {}

    def read(self) -> list[LayerFigures]:
        """The statistics of every layer and block part in model order; synchronizes with the device."""
        numbers = dict(zip(self._numbers, torch.stack(list(self._numbers.values())).tolist(), strict=True))
        inside: dict[str, list[str]] = {}
        for name in self._executor.model_state():
            for layer in layers_of(name):
                inside.setdefault(layer, []).append(name)

        def length(figure: Figure, names: list[str]) -> float | None:
            found = [numbers[figure, name] for name in names if (figure, name) in numbers]
            return math.hypot(*found) if found else None

        return [
            LayerFigures(
                name=layer,
                gradient=length("gradient", names),
                weight=length("weight", names),
                update=length("update", names),
                activation=length("activation", [layer]),
            )
            for layer, names in inside.items()
        ]

    def _note_norms(self, figure: Figure, tensors: Named) -> None:
        norms = self._executor.norms(tensors)
        self._numbers |= {(figure, name): norm for name, norm in zip(tensors, norms, strict=True)}


def layers_of(parameter: str) -> list[str]:
    """The layer of a parameter and, in a block, also its part (attention or mlp, with their norms)."""
    part = re.match(r"(blocks\.\d+)\.(attention|mlp)", parameter)
    return [part[1], part[0]] if part else [parameter.split(".")[0]]


def _once(register: Callable[[Callable], RemovableHandle], note: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls `note` with the module's next output (or input, per `register`), once: later microbatches are skipped."""

    def hook(module: nn.Module, received: tuple[Tensor, ...], given: Tensor | None = None) -> None:
        handle.remove()
        note(received[0] if given is None else given)

    handle = register(hook)
    return handle


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
