"""How the processes of a launched world wait for the one that prepares: by files, before any network is up.

Each process but the first leaves a note with a word of its own and looks for the same word in an answer. The first one
begins by throwing old notes away and answers when it is ready; who had come before that leaves its note again. So
neither an answer nor a note of an earlier launch, killed at any instant, is taken for one of this.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Literal

from ropewalk.base.errors import DataError
from ropewalk.base.files import read_json, storage, write_json
from ropewalk.config.ranks import Ranks

LOOK_EVERY_S = 0.1

What = Literal["train", "verify", "nothing"]
"""What there is to do together."""


class Meeting:
    """The place where the processes that were launched for a run find out what to do; beside the run, which may not
    be there yet. The first one must make it before it does anything else."""

    def __init__(self, run: Path, place: Ranks) -> None:
        self._folder = run.with_name(f".{run.name}.meeting")
        self._place = place
        self._told = False
        if place.rank == 0:
            with storage(f"looking into {self._folder}"):
                # The files alone: somebody may be writing into the folder.
                for old in self._folder.glob("*.json"):
                    old.unlink()

    def tell(self, what: What) -> None:
        """Tells every other process what there is to do; waits for those that have not come. The first word counts."""
        if self._told:
            return
        self._told = True
        for rank in range(1, self._place.world):
            while not self._note(rank).exists():
                time.sleep(LOOK_EVERY_S)
            write_json(self._answer(rank), {**read_json(self._note(rank), what="note"), "what": what})

    def hear(self) -> What:
        """What the first process says, when it does."""
        rank, word = self._place.rank, secrets.token_hex()
        while True:
            if _word(self._answer(rank)) == word:
                what: What = read_json(self._answer(rank), what="answer")["what"]
                return what
            if _word(self._note(rank)) != word:
                write_json(self._note(rank), {"word": word})
            time.sleep(LOOK_EVERY_S)

    def _note(self, rank: int) -> Path:
        return self._folder / f"note-{rank}.json"

    def _answer(self, rank: int) -> Path:
        return self._folder / f"answer-{rank}.json"


def _word(path: Path) -> str | None:
    """The word in a file; None where there is none, or no longer."""
    try:
        word: str = read_json(path, what="note")["word"]
    except DataError:
        return None
    return word
