"""Values cross the border between tests and tested code as they are, and nothing else does."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.evaluate.sandbox.inside.plain_data import dump, load

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(SCALARS, inner)
        | st.sets(SCALARS)
        | st.frozensets(SCALARS)
    ),
    max_leaves=12,
)
PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range)


def refuse(value: Any) -> Any:
    raise LookupError(f"an object: {value!r}")


@settings(max_examples=50)
@given(VALUES)
def test_reading_what_was_written_gives_an_equal_value_of_the_same_type(value: Any) -> None:
    found = load(dump(value, refuse), refuse)
    assert found == value
    assert type(found) is type(value)


@settings(max_examples=50)
@given(
    st.binary(max_size=60) | st.builds(lambda a, b: a + b, VALUES.map(lambda value: dump(value, refuse)), st.binary())
)
def test_any_bytes_give_plain_data_or_an_error(data: bytes) -> None:
    try:
        found = load(data, refuse)
    except (ValueError, TypeError, LookupError, struct.error, RecursionError, MemoryError, OverflowError):
        return
    assert type(found) in (*PLAIN, type) or type(found).__name__ == "deque"


def test_an_instance_of_a_subclass_arrives_as_the_built_in_value() -> None:
    class Lie(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

        def __int__(self) -> int:
            return 42

    found = load(dump(Lie(3), refuse), refuse)
    assert type(found) is int
    assert found == 3


def test_other_objects_are_passed_by_number() -> None:
    kept: list[object] = []
    data = dump([object, 1], lambda value: kept.append(value) or len(kept) - 1)
    assert load(data, lambda number: ("object", number)) == [("object", 0), 1]
    assert kept == [object]
    with pytest.raises(LookupError):
        load(data, refuse)
