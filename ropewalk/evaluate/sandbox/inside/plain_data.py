"""Bytes for plain data, and back: how the tests and the tested code exchange arguments and answers.

Reading makes only the built-in types below, whatever the bytes are, so that an answer cannot carry code, such as an
`__eq__` that is always true, into the interpreter that compares it. (Unpickling could, and `marshal` may crash.)
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any

_COUNT, _FLOAT = struct.Struct(">I"), struct.Struct(">d")
_NONE, _TRUE, _FALSE, _INT, _FLOATING, _COMPLEX, _TEXT, _BYTES, _BYTEARRAY, _RANGE, _CLASS, _OBJECT = b"NTFifcsbBrKO"
_SEQUENCES: dict[int, Callable[[list[Any]], Any]] = {
    ord("l"): list,
    ord("t"): tuple,
    ord("S"): set,
    ord("Z"): frozenset,
    ord("q"): deque,
}
_KINDS = ((list, b"l"), (tuple, b"t"), (set, b"S"), (frozenset, b"Z"), (deque, b"q"))
_DICT = ord("d")
_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range)
}


def dump(value: Any, number_of: Callable[[Any], int]) -> bytes:
    """`value` as bytes. Instances of subclasses become instances of the built-in class. `number_of` gives the number
    of any other object, under which its process keeps it."""
    parts: list[bytes] = []
    _dump(value, parts.append, number_of)
    return b"".join(parts)


def _dump(value: Any, put: Callable[[bytes], None], number_of: Callable[[Any], int]) -> None:
    if value is None:
        put(b"N")
    elif value is True or value is False:
        put(b"T" if value else b"F")
    elif isinstance(value, int):
        whole = int.__int__(value)
        _put_bytes(b"i", whole.to_bytes(whole.bit_length() // 8 + 1, "big", signed=True), put)
    elif isinstance(value, float):
        put(b"f" + _FLOAT.pack(value))
    elif isinstance(value, complex):
        put(b"c" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag))
    elif isinstance(value, str):
        _put_bytes(b"s", str.__str__(value).encode("utf-8", "surrogatepass"), put)
    elif isinstance(value, (bytes, bytearray)):
        _put_bytes(b"b" if isinstance(value, bytes) else b"B", bytes(value), put)
    elif isinstance(value, range):
        put(b"r")
        for part in (value.start, value.stop, value.step):
            _dump(part, put, number_of)
    elif isinstance(value, dict):
        put(b"d" + _COUNT.pack(len(value)))
        for key, each in value.items():
            _dump(key, put, number_of)
            _dump(each, put, number_of)
    else:
        _dump_other(value, put, number_of)


def _dump_other(value: Any, put: Callable[[bytes], None], number_of: Callable[[Any], int]) -> None:
    for kind, mark in _KINDS:
        if isinstance(value, kind):
            items = list(value)
            put(mark + _COUNT.pack(len(items)))
            for each in items:
                _dump(each, put, number_of)
            return
    name = next((name for name, kind in _CLASSES.items() if kind is value), "")
    if name:
        _put_bytes(b"K", name.encode(), put)
    else:
        put(b"O" + _COUNT.pack(number_of(value)))


def _put_bytes(mark: bytes, data: bytes, put: Callable[[bytes], None]) -> None:
    put(mark + _COUNT.pack(len(data)))
    put(data)


def load(data: bytes, object_of: Callable[[int], Any]) -> Any:
    """The value that `data` holds; ValueError, TypeError, LookupError, struct.error or RecursionError if it is none.
    `object_of` gives the object for a number."""
    value, end = _load(data, 0, object_of)
    if end != len(data):
        raise ValueError("bytes after the value")
    return value


def _load(data: bytes, at: int, object_of: Callable[[int], Any]) -> tuple[Any, int]:
    mark = data[at]
    at += 1
    if mark == _NONE:
        return None, at
    if mark in (_TRUE, _FALSE):
        return mark == _TRUE, at
    if mark == _FLOATING:
        return _FLOAT.unpack_from(data, at)[0], at + 8
    if mark == _COMPLEX:
        return complex(_FLOAT.unpack_from(data, at)[0], _FLOAT.unpack_from(data, at + 8)[0]), at + 16
    if mark == _RANGE:
        parts = []
        for _ in range(3):
            part, at = _load(data, at, object_of)
            parts.append(part)
        return range(*parts), at
    count = _COUNT.unpack_from(data, at)[0]
    at += 4
    if mark == _OBJECT:
        return object_of(count), at
    if mark in (_INT, _TEXT, _BYTES, _BYTEARRAY, _CLASS):
        found = data[at : at + count]
        if len(found) != count:
            raise ValueError("too short")
        return _scalar(mark, found), at + count
    if mark == _DICT:
        table = {}
        for _ in range(count):
            key, at = _load(data, at, object_of)
            table[key], at = _load(data, at, object_of)
        return table, at
    make = _SEQUENCES.get(mark)
    if make is None:
        raise ValueError(f"no kind {mark}")
    items = []
    for _ in range(count):
        item, at = _load(data, at, object_of)
        items.append(item)
    return make(items), at


def _scalar(mark: int, found: bytes) -> Any:
    if mark == _INT:
        return int.from_bytes(found, "big", signed=True)
    if mark == _TEXT:
        return found.decode("utf-8", "surrogatepass")
    if mark == _CLASS:
        return _CLASSES[found.decode("ascii")]
    return found if mark == _BYTES else bytearray(found)
