"""Kernels made ready before many processes need them.

A kernel is compiled once on a machine, which takes seconds, and found in a cache from then on. Were every worker to
compile what it meets, all of them would do the same work; here each group of kernels is compiled by one, while the
others read.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from .config import Prepare
from .encode import document_keys
from .measures import measure
from .near.corpus import near_duplicates

_TEXT = pa.array(["One text of two lines, said twice.\n" * 4, "绳索\n"], pa.large_string())


def warm(task: tuple[Prepare, str]) -> None:
    """Makes the kernels of one group ready, as the settings use them."""
    settings, group = task
    _GROUPS[group](settings)


def groups(settings: Prepare) -> list[str]:
    """The groups that the settings need, in the order of need."""
    return ["measure", *(["near"] if settings.deduplicate.near.kind != "off" else []), "encode"]


def _measure(settings: Prepare) -> None:
    names = pa.array([""] * len(_TEXT), pa.string())
    measure(pa.record_batch([names, names, _TEXT], names=["source", "url", "text"]), settings.filter)


def _near(settings: Prepare) -> None:
    near_duplicates(lambda: [_TEXT], settings.deduplicate.near)


def _encode(settings: Prepare) -> None:
    document_keys(pa.array(["source:folder/file"]))


_GROUPS: dict[str, Callable[[Prepare], None]] = {"measure": _measure, "near": _near, "encode": _encode}
