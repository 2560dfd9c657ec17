"""An origin whose files lie in several stores: what one does not give is asked of the next.

For manifests, indices and other small files that are read one by one; shards are shared among all stores
(`load/stripes.py`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from ropewalk.base.errors import DataError, StorageError

from .items import Item
from .origin import Origin, Reading

_log = logging.getLogger(__name__)

T = TypeVar("T")


class MirroredOrigin(Origin):
    """Reads a file from where its name says or, when that store fails, from a mirror of it. Files keep their names."""

    def __init__(self, mirrors: Sequence[tuple[str, str]], *, reading: Reading | None = None) -> None:
        """`mirrors`: (folder or URL with which names begin, where the mirror holds them), preferred ones first."""
        super().__init__(reading)
        self._mirrors = [(_folder(of), _folder(at)) for of, at in mirrors]
        self._down: set[str] = set()
        """Bases that have failed: asked last from then on, because each failure takes seconds of asking again."""

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        """As `Origin.fetch`, file by file from the first store that gives it."""
        found: dict[int, bytes | memoryview] = {}
        places: dict[str, list[int]] = {}
        for number, item in enumerate(items):
            places.setdefault(item.file, []).append(number)
        for file, numbers in places.items():
            asked = [items[number] for number in numbers]

            def fetch(place: str, asked: Sequence[Item] = asked) -> list[bytes | memoryview]:
                return Origin.fetch(self, [dataclasses.replace(item, file=place) for item in asked])

            found.update(zip(numbers, self._first(file, fetch), strict=True))
        return [found[number] for number in range(len(items))]

    def size(self, file: str) -> int:
        return self._first(file, super().size)

    def read(self, file: str) -> bytes:
        return self._first(file, super().read)

    def names(self, folder: str) -> list[str]:
        # A store that has nothing there says so by an empty list.
        return self._first(folder, super().names, enough=bool)

    def _first(self, name: str, ask: Callable[[str], T], *, enough: Callable[[T], bool] = lambda _: True) -> T:
        """What the first place that holds `name` answers; the error of the first of all when none does."""
        errors: list[Exception] = []
        answer: T | None = None
        places = self._places(name)
        for base, place in places:
            try:
                answer = ask(place)
            except (StorageError, DataError) as error:
                errors.append(error)
                if isinstance(error, StorageError):
                    self._note_down(base, error, others=len(places) > 1)
                continue
            if enough(answer):
                return answer
        if answer is not None:
            return answer
        if len(errors) > 1:
            told = "; ".join(str(error) for error in errors)
            kind = DataError if all(isinstance(error, DataError) for error in errors) else StorageError
            raise kind(f"none of {len(errors)} stores gave {name}: {told}")
        raise errors[0]

    def _places(self, name: str) -> list[tuple[str, str]]:
        """(base, name there) for all stores that hold `name`, those that have not failed first."""
        holding = [(of, at) for of, at in self._mirrors if _folder(name).startswith(of)]
        own = holding[0][0] if holding else ""
        mirrored = [(at, (at + _folder(name).removeprefix(of)).rstrip("/")) for of, at in holding]
        return sorted([(own, name), *mirrored], key=lambda each: each[0] in self._down)

    def _note_down(self, base: str, error: StorageError, *, others: bool) -> None:
        if base not in self._down:
            self._down.add(base)
            if others:
                _log.warning("%s; a mirror is asked in its place", error)


def _folder(place: str) -> str:
    return place.rstrip("/") + "/"
