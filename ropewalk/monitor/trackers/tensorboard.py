"""A curve as an event file of TensorBoard, in a folder of the run's name.

The format is small (records with lengths and checksums; two kinds of messages), so it is written here: the package
`tensorboard` brings 160 MB, torch's writer needs torch as well. A test reads files back with that package.

TensorBoard follows the end of a file and never rereads, so a file only grows. Undone points stay in it, followed by a
record that makes TensorBoard discard everything from a step on (`SessionLog.START`, as TensorFlow writes it when a job
restarts).
"""

from __future__ import annotations

import struct
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ..follow import Point
from .appending import AppendedFile

ENDING = ".ropewalk"
PIECE = 1 << 20


class TensorBoardTracker:
    """A tracker that writes one file in the folder `place/run`."""

    def __init__(self, place: Path, run: str) -> None:
        folder = place / run
        mine = sorted(folder.glob(f"events.out.tfevents.*{ENDING}"))
        # TensorBoard reads what has `tfevents` in its name.
        new = folder / f"events.out.tfevents.{int(time.time()):010d}{ENDING}"
        self._file = AppendedFile(mine[-1] if mine else new)
        self._steps = array("q")

    def resume(self, points: Iterator[Point]) -> int:
        data = self._file.read()
        there: list[bytes] = []
        size = 0
        for message in _messages(data):
            size += len(message) + _FRAME
            start = _start_step(message)
            if start is not None:
                del there[bisect_left(self._steps, start) :]
                del self._steps[len(there) :]
            elif (step := _point_step(message)) is not None:
                there.append(message)
                self._steps.append(step)
        self._file.cut(size)  # a torn record
        same = 0
        first = next(points, None)
        if not size:
            self._file.append(_record(_version_message(first.time if first else time.time())))
        for point, message in zip(chain([first] if first else [], points), there, strict=False):
            if _point_message(point) != message:
                break
            same += 1
        if same < len(there):
            step = self._steps[same]
            same = bisect_left(self._steps, step)
            self.drop(step)
        return same

    def drop(self, step: int) -> None:
        del self._steps[bisect_left(self._steps, step) :]
        self._file.append(_record(_start_message(step)))

    def write(self, points: Iterator[Point]) -> None:
        held = bytearray()
        for point in points:
            held += _record(_point_message(point))
            self._steps.append(point.step)
            if len(held) > PIECE:
                self._file.append(bytes(held))
                held.clear()
        self._file.append(bytes(held))

    def close(self) -> None:
        self._file.close()


# Messages: fields of protocol buffers, each a key (number << 3 | type) and a value. Of `Event`: 1 wall_time (double),
# 2 step (varint), 3 file_version (bytes), 5 summary, 7 session_log; of `Summary`: 1 value (repeated), which has 1 tag
# and 2 simple_value (float); of `SessionLog`: 1 status. We write them in the order of their numbers.

_VERSION = b"\x1a\x0dbrain.Event:2"
_START = b"\x3a\x02\x08\x01"
_SUMMARY = b"\x2a"


def _point_message(point: Point) -> bytes:
    values = b"".join(
        _field(b"\x0a", _field(b"\x0a", name.encode()) + b"\x15" + _float(value))
        for name, value in point.figures.items()
    )
    return _head(point.time, point.step) + _field(_SUMMARY, values)


def _version_message(moment: float) -> bytes:
    """The first message of a file; readers take its time as the start of the run."""
    return b"\x09" + struct.pack("<d", moment) + _VERSION


def _start_message(step: int) -> bytes:
    return _head(time.time(), step) + _START


def _head(moment: float, step: int) -> bytes:
    return b"\x09" + struct.pack("<d", moment) + b"\x10" + _varint(step)


def _start_step(message: bytes) -> int | None:
    """The step of a message that discards later points; None for others."""
    return _step(message)[0] if message.endswith(_START) and _step(message)[1] == _START else None


def _point_step(message: bytes) -> int | None:
    step, rest = _step(message)
    return step if rest.startswith(_SUMMARY) else None


def _step(message: bytes) -> tuple[int | None, bytes]:
    """The step of a message, and what follows it."""
    if message[9:10] != b"\x10":
        return None, b""
    step = shift = 0
    for place in range(10, len(message)):
        step |= (message[place] & 0x7F) << shift
        shift += 7
        if message[place] < 0x80:
            return step, message[place + 1 :]
    return None, b""


def _field(key: bytes, value: bytes) -> bytes:
    return key + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # beyond 3.4e38
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


# Records: the length of the message, its checksum, the message, its checksum.

_FRAME = 16


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", _masked(length)) + message + struct.pack("<I", _masked(message))


def _messages(data: bytes) -> Iterator[bytes]:
    """The messages of whole, intact records up to the first torn one."""
    place = 0
    while place + _FRAME <= len(data):
        length = data[place : place + 8]
        end = place + _FRAME + struct.unpack("<Q", length)[0]
        message = data[place + 12 : end - 4]
        if end > len(data) or _record(message) != data[place:end]:
            return
        yield message
        place = end


def _masked(data: bytes) -> int:
    """CRC-32C, rotated and offset, so that the checksum of data that contains a checksum differs from it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        rows.append(byte)
    return tuple(rows)


_TABLE = _table()
