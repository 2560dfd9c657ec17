"""Shards of the weights of a Hugging Face directory, for an executor to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ropewalk.model.hugging_face.convert import Imported

from .placement import Choose, LocalShard


class DirectoryShards(Mapping[str, Tensor | LocalShard]):
    """The selected shards of the weights of a Hugging Face directory, read lazily."""

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
