"""A small schema with every kind of field, and the smallest valid recipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ropewalk.base.errors import ConfigError

SMALLEST = """name = "tiny"
[[prepare.sources]]
name = "a"
paths = ["x.txt"]
"""


@pytest.fixture(scope="session")
def smallest() -> str:
    return SMALLEST


@pytest.fixture(scope="session")
def problems_of() -> Callable[[Callable[[], object]], list[str]]:
    """Every problem of a call that must fail, as text."""

    def run(call: Callable[[], object]) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            call()
        return [str(problem) for problem in caught.value.problems]

    return run
