"""What a rank holds of the training state: saved, loaded and updated.

The state is parameters, moments of the optimizer, loss scale, statistics of the anomaly guard, and errors that gradient
compression has not sent. A rank holds its parts; `Placement` says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ropewalk.model.sharding import whole_name
from ropewalk.model.spec import Spec

from .anomaly_guard import SpikeRule, Watch
from .data.reducers import Reducers
from .memory.host_optimizer import HostOptimizer
from .mesh import Mesh
from .multi_device import Devices
from .placement import Choose, LocalShard, Placement, Shard, whole_placement
from .precision import LossScale, Masters

Named = Mapping[str, Tensor]

MEANS = {"row_var": 1, "col_var": 0, "mean_scale": 1, "root_scale": 1}
"""Moments that sum up a dimension of their parameter, as means (Adafactor) or its largest (adamw-8bit): which one."""


class RankState:
    """The training state of this rank; without an optimizer, parameters alone."""

    def __init__(
        self,
        spec: Spec,
        mesh: Mesh,
        data: Reducers,
        *,
        device: torch.device,
        optimizer: torch.optim.Optimizer | HostOptimizer | None,
        copies: Sequence[Masters | Devices] = (),
        spike: SpikeRule | None = None,
        scales_loss: bool = False,
    ) -> None:
        """`copies` of the parameters, narrower ones or on other devices, follow every update."""
        self._spec, self._mesh, self._data, self._copies = spec, mesh, data, copies
        self.host = optimizer if isinstance(optimizer, HostOptimizer) else None
        self._optimizer = optimizer.optimizer if isinstance(optimizer, HostOptimizer) else optimizer
        assert self._optimizer is None or guards(self._optimizer), "this optimizer would follow a broken gradient"
        self._device = device
        self.guard = Watch(spike, device)
        self.loss_scale = LossScale(device) if scales_loss else None
        self.parameters = data.parameters | (self.host.parameters if self.host else {})
        """What the optimizer updates and a checkpoint keeps, on the device or on the host."""
        self.trained = {name: self.parameters[name] for name, p in data.parameters.items() if p.requires_grad}
        self._narrow = any(p.grad_dtype != p.dtype for p in self.trained.values())
        self.clips = self.host is not None or self._narrow
        """Whether the update clips: on the host, and where narrow gradients would be rounded once more."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, wherever it updates."""
        assert self._optimizer is not None, "an executor made without an optimizer only scores"
        return self._optimizer

    def count_updates(self) -> Tensor | int:
        """Updates so far, as the optimizer counts them."""
        return next((state["step"] for state in self.optimizer.state.values()), 0)

    def set_rate(self, lr: float) -> None:
        """Sets the learning rate of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)

    def update(self, skipped: Tensor, factor: Tensor | None, *, overflowed: Tensor) -> None:
        """The guarded update: where `skipped` is 1 nothing changes, decided on the device. With `clips` the optimizer
        takes gradients before clipping, and the `factor`."""
        if self.host:
            self.host.step(skipped, scale=factor)
        else:
            scale = 1 / factor if factor is not None and self._narrow else None
            vars(self.optimizer).update(found_inf=skipped, grad_scale=scale)
            self.optimizer.step()
        if not getattr(self.optimizer, "rounds", False):
            self._publish_copies()
        self._data.publish()
        if self.loss_scale:
            self.loss_scale.update(overflowed.float())

    def model_state(self) -> dict[str, LocalShard]:
        """This rank's parts of the parameters by name, trained or not, as the optimizer sees them: float32 in every
        precision."""
        return {
            name: LocalShard(parameter.detach(), self._data.placements[name])
            for name, parameter in self.parameters.items()
            if not self.is_tied_copy(name)
        }

    def optimizer_state(self) -> dict[str, LocalShard]:
        """The optimizer's tensors as `moment/parameter`; also `guard/...`, in fp16 `loss_scale/...`, with PowerSGD
        `compression/...`."""
        state, placements = self.optimizer.state, self._data.placements
        found = {
            f"{moment}/{name}": LocalShard(tensor, moment_placement(moment, tensor, placements[name]))
            for name, parameter in self.trained.items()
            if not self.is_tied_copy(name)
            for moment, tensor in state.get(parameter, {}).items()
        }
        others = {"guard": self.guard.state, "loss_scale": self.loss_scale.state if self.loss_scale else {}}
        for kind, tensors in others.items():
            for name, tensor in tensors.items():
                found[f"{kind}/{name}"] = LocalShard(tensor, whole_placement(tensor.shape, first=self._mesh.rank == 0))
        return found | {f"compression/{name}": part for name, part in self._data.owed().items()}

    def wants(self) -> Choose:
        """Which part of each tensor of a state this rank needs to go on from it."""
        parameters, trained = self._holders(self.parameters), self._holders(self.trained)

        def choose(group: str, name: str, shape: tuple[int, ...]) -> Placement | None:
            kind, parameter = name.split("/", 1) if group == "optimizer" else ("", name)
            if kind in ("guard", "loss_scale", "compression", "sampler"):
                return whole_placement(shape, first=self._mesh.rank == 0)
            held = next(iter((trained if kind else parameters).get(parameter, ())), None)
            if held is None:
                return None
            placement = self._data.placements[held]
            placement = dataclasses.replace(placement, first=placement.first and not self.is_tied_copy(held))
            return whole_moment_placement(kind, shape, placement) if kind else placement

        return choose

    @torch.no_grad()
    def load(self, model: Mapping[str, Tensor | LocalShard], optimizer: Mapping[str, Tensor | LocalShard]) -> None:
        """Takes over a state: whole tensors, or of each the part that this rank `wants`."""
        strange = model.keys() - self._spec.shapes().keys()
        assert not strange, f"{min(strange)}: the state is of another model"
        for name, parameter in self.parameters.items():
            whole = whole_name(name, self._spec)
            assert whole in model, f"{whole}: the state is of another model"
            parameter.copy_(self._data.placements[name].take(model[whole]))
        holders = self._holders(self.trained)
        for key, tensor in optimizer.items():
            kind, name = key.split("/", 1)
            local = tensor.local if isinstance(tensor, LocalShard) else tensor
            if kind == "guard":
                # A run may have been saved under another rule for spikes.
                if name in self.guard.state:
                    self.guard.state[name] = local.to(self._device, copy=True)
            elif kind == "sampler":
                continue  # the loader's, which takes it over by itself
            elif kind == "compression":
                self._data.owe(name, local)
            elif kind == "loss_scale":
                assert self.loss_scale, "the state is of another precision"
                self.loss_scale.state[name] = local.to(self._device, copy=True)
            else:
                for held in holders.get(name, ()):
                    self._load_moment(kind, held, tensor)
        if self.host:
            self.host.publish()
        self._publish_copies()
        self._data.publish(everything=True)

    def is_tied_copy(self, name: str) -> bool:
        """Whether this parameter is the last stage's copy of the embedding."""
        return whole_name(name, self._spec) != name

    def _publish_copies(self) -> None:
        for each in self._copies:
            each.publish()

    def _holders(self, names: Iterable[str]) -> dict[str, list[str]]:
        """By the names of a state's tensors, the parameters of this rank that are parts of them."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(whole_name(name, self._spec), []).append(name)
        return found

    def _load_moment(self, kind: str, name: str, tensor: Tensor | LocalShard) -> None:
        parameter, placement = self.trained[name], self._data.placements[name]
        shape = tensor.placement.shape if isinstance(tensor, LocalShard) else tuple(tensor.shape)
        part = whole_moment_placement(kind, shape, placement).take(tensor)
        state = self.optimizer.state[parameter]
        # `step` counts live where the optimizer keeps them; moments live with their parameter.
        device = parameter.device if part.dim() or self._device.type == "cuda" else torch.device("cpu")
        if self.host and kind in state:
            state[kind].copy_(part)  # it may lie in a file
        else:
            state[kind] = part.to(device, copy=True).contiguous()


def guards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` leaves weights, moments and counters as they are when its `found_inf` is 1, decided on the
    device: the contract between torch's GradScaler and its fused optimizers, which ours declare too."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def moment_placement(moment: str, tensor: Tensor, placement: Placement) -> Placement:
    """Which part of the whole moment a rank has: it is split as its parameter is, a mean only along what it keeps."""
    shape = list(tensor.shape)
    for shard in _moment_shards(moment, tensor.dim(), placement)[0]:
        shape[shard.dim] = placement.shape[shard.dim]
    return whole_moment_placement(moment, tuple(shape), placement)


def whole_moment_placement(moment: str, shape: tuple[int, ...], placement: Placement) -> Placement:
    """The same, by the `shape` of the whole moment."""
    kept, same = _moment_shards(moment, len(shape), placement)
    return Placement(shape, kept, placement.first and all(s.group.rank == 0 for s in same))


def _moment_shards(moment: str, dims: int, placement: Placement) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """The shards of a parameter that a moment of it shares, and those of which all ranks hold the same."""
    if dims != len(placement.shape):
        return (), placement.shards
    kept = tuple(s for s in placement.shards if s.dim != MEANS.get(moment))
    return kept, tuple(s for s in placement.shards if s not in kept)
