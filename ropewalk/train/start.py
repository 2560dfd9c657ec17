"""Weights that a phase does not begin from scratch with: those of the phase before, of a checkpoint, of a Hugging Face
directory.

Every rank reads the parts that it holds, one tensor at a time: nobody needs room for more than its own state and one
tensor, however large the model is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.format import TOKENIZER
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.load import CheckpointReader, LazyTensors
from ropewalk.checkpoint.read.model_check import advise_on_damage, check_weights
from ropewalk.checkpoint.run_state import Tensors, head_of
from ropewalk.model.hugging_face.configs import CONFIG
from ropewalk.model.hugging_face.convert import Imported
from ropewalk.model.init import initial_value
from ropewalk.model.spec import CHANGEABLE, Spec
from ropewalk.model.trainable import adapter_names, with_adapter
from ropewalk.parallel.placement import Choose, LocalShard, Placement


def load_start(
    place: str, spec: Spec, tokenizer: bytes, *, seed: int, choose: Choose, load: Callable[[Tensors], None]
) -> str:
    """Gives `load` the weights of the checkpoint or Hugging Face directory at `place`, as a model of `spec` has them,
    and returns where exactly they were; raises UserError unless they fit it and its `tokenizer`.

    The parts that `choose` names are read when `load` asks for them. New adapters are filled from `seed`.
    """
    hugging_face = (Path(place) / CONFIG).is_file()
    # Another run may be training where this one starts from.
    with contextlib.nullcontext(Path(place)) if hugging_face else leased(Path(place)) as path:
        source = _open_directory(path) if hugging_face else _open_checkpoint(path)
        _check(source, spec, tokenizer)
        carrying = Carrying(source.spec, spec, choose, seed=seed)
        with advise_on_damage(source.path):
            weights = source.weights(carrying.wants)
            load(carrying.weights(weights))
            if isinstance(weights, LazyTensors):
                weights.check()
        return str(source.path)


class Carrying:
    """How the state of a model of `before` becomes the part of one of `after` that a rank holds, as `choose` says:
    adapters that it lacks are merged, new ones do nothing yet. Adapters of the same kind go on."""

    def __init__(self, before: Spec, after: Spec, choose: Choose, *, seed: int) -> None:
        self._before, self._after, self._choose, self._seed = before, after, choose, seed
        same = _adapters(before) == _adapters(after)
        self._merged = set() if same else {name.rpartition(".")[0] for name in adapter_names(before)}
        self._fresh = set() if same else set(adapter_names(after))

    def wants(self, group: str, name: str, shape: tuple[int, ...]) -> Placement | None:
        """Which part of a tensor of the state before this rank needs."""
        parameter = name.split("/", 1)[-1]
        part, _, kind = parameter.rpartition(".")
        if kind not in ("lora_a", "lora_b") or not (self._fresh or self._merged):
            return self._choose(group, name, shape)
        if group != "model" or part not in self._merged:
            return None
        return self._adapter_cut(part, kind, shape)

    def weights(self, weights: Tensors) -> Tensors:
        """The weights of a model of `before`, read by `wants`, as one of `after` has them."""
        return weights if not (self._fresh or self._merged) else _Carried(self, weights)

    def moments(self, moments: Tensors) -> Tensors:
        """What an optimizer knows of parameters that are trained before and after. The guard starts anew: other data
        have other losses."""
        kept = [key for key in moments if key.split("/", 1)[0] not in ("guard", "compression", "sampler")]
        return _Some(moments, kept)

    def names(self) -> list[str]:
        """The parameters of which this rank holds a part."""
        return [name for name, shape in self._after.shapes().items() if self._choose("model", name, shape)]

    def part(self, name: str, weights: Tensors) -> Tensor | LocalShard:
        """This rank's part of one parameter."""
        shape = self._after.shapes()[name]
        placement, (part, _, kind) = self._choose("model", name, shape), name.rpartition(".")
        assert placement, f"{name}: not of this rank"
        if name in self._fresh:
            return LocalShard(placement.take(initial_value(name, shape, self._after, seed=self._seed)), placement)
        found = weights[name]
        if kind != "weight" or part not in self._merged:
            return found
        a, b = (_local(weights[f"{part}.{factor}"]) for factor in ("lora_a", "lora_b"))
        return LocalShard(with_adapter(_local(found), a, b, self._before), placement)

    def _adapter_cut(self, part: str, kind: str, shape: tuple[int, ...]) -> Placement | None:
        """Of the factors of B A, the columns of A and the rows of B that a part of their product needs."""
        name = f"{part}.weight"
        placement = self._choose("model", name, self._after.shapes()[name])
        dim = 1 if kind == "lora_a" else 0
        return placement and Placement(
            shape, tuple(slicing for slicing in placement.shards if slicing.dim == dim), placement.first
        )


class _Carried(Mapping[str, Tensor | LocalShard]):
    """The weights of a `Carrying`, made when they are asked for."""

    def __init__(self, carrying: Carrying, weights: Tensors) -> None:
        self._carrying, self._weights = carrying, weights
        self._names = carrying.names()

    def __getitem__(self, name: str) -> Tensor | LocalShard:
        return self._carrying.part(name, self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class _Some(Mapping[str, Tensor | LocalShard]):
    """Some tensors of a state, read when they are asked for."""

    def __init__(self, tensors: Tensors, names: list[str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor | LocalShard:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A model to start from."""

    path: Path
    spec: Spec
    tokenizer: bytes
    weights: Callable[[Choose], Tensors]
    """The parts that are chosen, read when they are asked for."""


def _open_directory(path: Path) -> _Source:
    from ropewalk.model.hugging_face.directory import read_directory  # needs tokenizers

    directory = read_directory(path, dtype="float32")
    return _Source(
        path=path,
        spec=directory.spec,
        tokenizer=directory.tokenizer,
        weights=lambda choose: _OfDirectory(directory.weights, choose),
    )


def _open_checkpoint(path: Path) -> _Source:
    with advise_on_damage(path):
        reader = CheckpointReader(path)
        check_weights(reader.manifest, path)
        tokenizer = reader.file(TOKENIZER)
    return _Source(
        path=path,
        spec=head_of(reader.manifest).spec,
        tokenizer=tokenizer,
        weights=lambda choose: LazyTensors(reader, "model", choose),
    )


class _OfDirectory(Mapping[str, Tensor | LocalShard]):
    """The chosen parts of the weights of a Hugging Face directory, read when they are asked for."""

    def __init__(self, weights: Imported, choose: Choose) -> None:
        self._weights = weights
        chosen = {name: choose("model", name, shape) for name, shape in weights.shapes.items()}
        self._placements = {name: placement for name, placement in chosen.items() if placement}

    def __getitem__(self, name: str) -> LocalShard:
        placement = self._placements[name]
        return LocalShard(self._weights.part(name, placement.offset, placement.local_shape), placement)

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def __contains__(self, name: object) -> bool:
        return name in self._placements


def _check(source: _Source, spec: Spec, tokenizer: bytes) -> None:
    """Refuses a model that `spec` or the tokenizer of the run does not fit."""
    # Adapters come and go; a row may have any length up to that of learned positions.
    free = {*CHANGEABLE, "sequence_length", "lora_rank", "lora_alpha", "lora_targets"}
    there, here = (dataclasses.asdict(one) | {"positions": one.learned_positions} for one in (source.spec, spec))
    other = [
        f"model.{key} is {there[key]}, here {here[key]}" for key in here if key not in free and there[key] != here[key]
    ]
    path = source.path
    if other:
        raise UserError(f"{path}: this model is another one ({'; '.join(other)}); remove what `[model]` says otherwise")
    if source.tokenizer != tokenizer and not _means(source, tokenizer):
        raise UserError(
            f"{path}: this model was trained with another tokenizer; set "
            f'`prepare.tokenizer.file = "{path / TOKENIZER}"`, so that its token ids mean the same'
        )


def _adapters(spec: Spec) -> tuple[object, ...]:
    return spec.lora_rank, spec.lora_alpha, spec.lora_targets


def _local(tensor: Tensor | LocalShard) -> Tensor:
    return tensor.local if isinstance(tensor, LocalShard) else tensor


def _means(source: _Source, tokenizer: bytes) -> bool:
    from ropewalk.prepare.foreign import same_meaning  # a worker that starts from scratch does without

    return same_meaning(source.tokenizer, tokenizer, path=source.path / TOKENIZER, vocabulary=source.spec.vocabulary)
