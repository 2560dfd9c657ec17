"""Initial weights of a phase: from the previous phase, a checkpoint or a Hugging Face directory.

Every rank reads its own shards, one tensor at a time: peak memory is a rank's state plus one tensor.
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
from ropewalk.model.init import initial_value
from ropewalk.model.spec import CHANGEABLE, Spec
from ropewalk.model.trainable import adapter_names, with_adapter
from ropewalk.parallel.directory_shards import DirectoryShards
from ropewalk.parallel.placement import Choose, LocalShard, Placement


def load_start(
    place: str, spec: Spec, tokenizer: bytes, *, seed: int, choose: Choose, load: Callable[[Tensors], None]
) -> str:
    """Loads the weights at `place` (checkpoint or Hugging Face directory) into a model of `spec` through `load`;
    returns the exact path. Raises UserError if the model or its tokenizer does not match.

    Shards selected by `choose` are read lazily. New adapters are initialized from `seed`.
    """
    hugging_face = (Path(place) / CONFIG).is_file()
    # Leased: another run may be training there and would delete old checkpoints.
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
    """Converts this rank's shards (`choose`) of a model of spec `before` to spec `after`: merges LoRA adapters that
    `after` lacks, initializes new ones to a zero update, keeps adapters of the same rank, alpha and targets."""

    def __init__(self, before: Spec, after: Spec, choose: Choose, *, seed: int) -> None:
        self._before, self._after, self._choose, self._seed = before, after, choose, seed
        same = _adapters(before) == _adapters(after)
        self._merged = set() if same else {name.rpartition(".")[0] for name in adapter_names(before)}
        self._fresh = set() if same else set(adapter_names(after))

    def wants(self, group: str, name: str, shape: tuple[int, ...]) -> Placement | None:
        """The placement of the tensor of the previous state that this rank reads; None: not read."""
        parameter = name.split("/", 1)[-1]
        part, _, kind = parameter.rpartition(".")
        if kind not in ("lora_a", "lora_b") or not (self._fresh or self._merged):
            return self._choose(group, name, shape)
        if group != "model" or part not in self._merged:
            return None
        return self._adapter_cut(part, kind, shape)

    def weights(self, weights: Tensors) -> Tensors:
        """The previous weights, read with `wants`, converted to `after`."""
        return weights if not (self._fresh or self._merged) else _Carried(self, weights)

    def moments(self, moments: Tensors) -> Tensors:
        """The optimizer state to keep. Loss statistics of the guard are reset: the data distribution changes."""
        kept = [key for key in moments if key.split("/", 1)[0] not in ("guard", "compression", "sampler")]
        return _Some(moments, kept)

    def names(self) -> list[str]:
        """Names of the parameters with a shard on this rank."""
        return [name for name, shape in self._after.shapes().items() if self._choose("model", name, shape)]

    def part(self, name: str, weights: Tensors) -> Tensor | LocalShard:
        """This rank's shard of one parameter."""
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
        """The columns of A or the rows of B needed for a shard of the product B A."""
        name = f"{part}.weight"
        placement = self._choose("model", name, self._after.shapes()[name])
        dim = 1 if kind == "lora_a" else 0
        return placement and Placement(
            shape, tuple(slicing for slicing in placement.shards if slicing.dim == dim), placement.first
        )


class _Carried(Mapping[str, Tensor | LocalShard]):
    """The converted weights of a `Carrying`, computed lazily."""

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
    """A lazily read subset of the tensors of a state."""

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
    """A model to initialize from."""

    path: Path
    spec: Spec
    tokenizer: bytes
    weights: Callable[[Choose], Tensors]
    """The selected shards, read lazily."""


def _open_directory(path: Path) -> _Source:
    from ropewalk.model.hugging_face.directory import read_directory  # needs tokenizers

    directory = read_directory(path, dtype="float32")
    return _Source(
        path=path,
        spec=directory.spec,
        tokenizer=directory.tokenizer,
        weights=lambda choose: DirectoryShards(directory.weights, choose),
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


def _check(source: _Source, spec: Spec, tokenizer: bytes) -> None:
    """Raises UserError if the model or tokenizer of `source` does not match the run."""
    # Adapters may differ; sequence length may differ unless positions are learned.
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
    from ropewalk.prepare.foreign import same_meaning  # imported here: not needed when training from scratch

    return same_meaning(source.tokenizer, tokenizer, path=source.path / TOKENIZER, vocabulary=source.spec.vocabulary)
