"""Answers of a model, appended as they come: `evaluation/answers.jsonl`. No torch.

The first line names the model; every other line holds one answer under the content hash of its request, with a CRC-32
as its last key. A killed evaluation continues with the requests that are missing, at any world size, and metrics are
computed again without the model. A torn or damaged line is reported and asked again; a file of another model is
replaced.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ropewalk.base.files import committed_file, read_regular, storage
from ropewalk.plan.plan import Plan

from .task import Answer, Generate, Generation, Likelihood, LogLikelihood, Request, Rolling

ANSWERS = "evaluation/answers.jsonl"
FORMAT = 1
_MARK = b', "crc": '

_log = logging.getLogger(__name__)

Identity = Mapping[str, Any]
"""What answers depend on beside the request: the model, the seed of generation."""


def answers_of(model: str, plan: Plan, *, seed: int) -> Identity:
    """The identity of the answers of the model with the content hash `model`, under a plan of any layout."""
    return {"model": model, "precision": plan.precision, "seed": seed}


def request_key(request: Request) -> str:
    """A hash of what is asked, repeat and sampling included."""
    parts: list[Any]
    match request:
        case Rolling():
            parts = ["rolling", _plain(request.text)]
        case LogLikelihood():
            parts = ["loglikelihood", _plain(request.context), _plain(request.continuation)]
        case Generate():
            parts = ["generate", _plain(request.prompt), dataclasses.asdict(request.sampling), request.repeat]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, ensure_ascii=False).encode("utf-8", "backslashreplace"))


class Answers:
    """The answers of one model, by request key. Without a folder they live in memory only."""

    def __init__(self, folder: Path | None, identity: Identity) -> None:
        self.path = None if folder is None else folder / ANSWERS
        self._identity = {"format": FORMAT, **identity}
        self._found: dict[str, Answer] = {}
        self._is_open = False
        if self.path is not None:
            found = read_answers(self.path, self._identity)
            if found is not None:
                self._found, self._is_open = found, True

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> Answer:
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    def add(self, answers: Iterable[tuple[str, str, Answer]]) -> None:
        """Appends (key, task, answer) where the key is new. The lines are durable on return."""
        lines = []
        for key, task, answer in answers:
            if key in self._found:
                continue
            self._found[key] = answer
            # JSON has no infinity; such an answer is computed again.
            if not (isinstance(answer, Likelihood) and not math.isfinite(answer.log_probability)):
                lines.append(_line({"key": key, "task": task, **dataclasses.asdict(answer)}))
        if self.path is None or not lines:
            return
        if not self._is_open:
            with committed_file(self.path) as new:
                new.write(_line(self._identity))
            self._is_open = True
        with storage(f"writing {self.path}"), open(self.path, "ab") as file:
            if not _ends_with_newline(self.path):
                file.write(b"\n")
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())


def read_answers(path: Path, identity: Identity) -> dict[str, Answer] | None:
    """The sound answers in `path` by request key; None if there is no file, or if it is of another model or damaged in
    its first line."""
    lines = read_lines(path)
    if not lines or lines[0] != json.loads(json.dumps(dict(identity))):
        return None
    return {tree["key"]: _answer(tree) for tree in lines[1:]}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The first line and the sound answers in `path`; nothing if there is no file, or if its first line is damaged. A
    warning names the damage."""
    try:
        with storage(f"reading {path}"):
            data = read_regular(path)
    except FileNotFoundError:
        return []
    *lines, _ = data.split(b"\n")  # what follows the last line end was cut by a kill
    found = [_parsed(line) for line in lines]
    damaged = [number for number, tree in enumerate(found, start=1) if tree is None]
    if not lines or 1 in damaged:
        _log.warning("%s: this file of answers is damaged in its first line; the model is asked again", path)
        return []
    if damaged:
        where = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        _log.warning("%s: damaged in line %s; the model is asked these requests again", path, where)
    return [tree for tree in found if tree is not None]


def _plain(text: str | np.ndarray) -> str | list[int]:
    return text if isinstance(text, str) else [int(token) for token in text]


def _answer(tree: Mapping[str, Any]) -> Answer:
    if "text" in tree:
        return Generation(list(tree["tokens"]), tree["text"])
    return Likelihood(tree["log_probability"], tree["tokens"], tree["correct"])


def _line(tree: Mapping[str, Any]) -> bytes:
    body = json.dumps(tree, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")[:-1]
    return body + _MARK + b"%d}\n" % zlib.crc32(body)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None unless its checksum is right."""
    body, mark, _ = line.rpartition(_MARK)
    if not mark or line != body + _MARK + b"%d}" % zlib.crc32(body):
        return None
    tree: dict[str, Any] = json.loads(body + b"}")
    return tree


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
