"""Keys without effect: the recipe still has their values, checks and files show them, but code that asks gets the
default. A pytest plugin: `pytest -p tests.wiring.ignored --ignore-key train.clip_norm`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

Ignored = Sequence[tuple[str, Any]]
_CONFIG = "ropewalk.config."
"""Modules that read, check and write recipes; they see what the user wrote."""


@contextlib.contextmanager
def ignoring(keys: Ignored) -> Iterator[None]:
    """In the block each of these keys has this value for whoever asks."""
    with contextlib.ExitStack() as stack:
        for key, value in keys:
            stack.enter_context(_ignoring(key, value))
        yield


def default_of(key: str) -> Any:
    """What a recipe that does not name the key has; `dataclasses.MISSING` where it must."""
    from tests.wiring.rows import keys_of

    return dict(keys_of())[key].default


@contextlib.contextmanager
def _ignoring(key: str, value: Any) -> Iterator[None]:
    from tests.wiring.rows import keys_of

    field = dict(keys_of())[key]
    owner: Any = field.owner
    slot = owner.__dict__[field.name]

    class Deaf:
        """In the place of the field: takes any value, and gives always the same."""

        def __get__(self, instance: Any, cls: Any = None) -> Any:
            if instance is None:
                return slot
            asks = sys._getframe(1).f_globals.get("__name__", "")
            return slot.__get__(instance, cls) if asks.startswith(_CONFIG) else value

        def __set__(self, instance: Any, given: Any) -> None:
            slot.__set__(instance, given)

    setattr(owner, field.name, Deaf())
    try:
        yield
    finally:
        setattr(owner, field.name, slot)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ignore-key", default="", help="a key of the recipe that is to have no effect")


def pytest_configure(config: pytest.Config) -> None:
    key = config.getoption("--ignore-key")
    if not key:
        return
    from tests.wiring import verbs

    value = default_of(key)
    assert value is not dataclasses.MISSING, f"{key} has no default"
    verbs.IGNORED.append((key, value))
    stack = contextlib.ExitStack()
    stack.enter_context(ignoring([(key, value)]))
    config.add_cleanup(stack.close)
