"""The corpus on its way through the stages that decide: what is left of it, and where its texts are now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ropewalk.base.progress import Progress

from ..columns import Mask
from ..config import Prepare
from ..corpus import Corpus
from ..cuts import CutTask, Spans, characters_left, cut_key, cut_texts
from ..documents import Edits
from ..fates import Fates, Removal
from ..ledger import REPEATS
from ..severe import addressed
from ..texts import Texts
from ..workers import Workers


@dataclass(slots=True)
class State:
    """What every stage reads, and changes through `Fates.close` and `cut`."""

    settings: Prepare
    corpus: Corpus
    fates: Fates
    texts: list[Texts]
    """The texts of each chunk as they are now."""
    stages: Path
    workers: Workers
    progress: Progress
    recipe: str = ""
    """How commands name the recipe, where it is known."""
    warnings: list[str] = field(default_factory=list)
    repeats: pa.Table = field(default_factory=REPEATS.empty_table)
    """Spans that occur earlier in the corpus, and where they stay; bytes of texts before any of them was cut."""

    def warn(self, text: str) -> None:
        """Tells the user now, and the manifest's readers later."""
        self.warnings.append(text)
        self.progress.say(addressed(text, self.recipe))

    @property
    def uncut(self) -> Mask:
        """Documents that no stage may cut: dialogues, which are turns and not running text."""
        dialogues = [number for number, source in enumerate(self.settings.sources) if source.format == "chat"]
        return np.isin(self.fates.source, dialogues)

    def chunks(self, chosen: Mask) -> Iterator[tuple[Texts, Mask, int]]:
        """(texts, which of them are chosen, bytes of these) of each chunk."""
        sizes = self.corpus.bytes_by_chunk(self.fates.sizes, chosen)
        return zip(self.texts, self.corpus.by_chunk(chosen), sizes, strict=True)

    def cut(self, stage: str, rule: str, spans: Spans, *, least: int, unit: Literal["bytes", "characters"]) -> None:
        """Ends `stage`: `spans` are cut out; a document of which less than `least` is left goes.

        Spans of documents that go stay in their texts, which nobody reads any more.
        """
        removed = spans.removed_bytes(len(self.corpus))
        left = self.fates.sizes - removed
        touched = removed > 0
        least = max(least, 1)
        length = self._characters_left(spans, left, least=least) if unit == "characters" else left
        short = np.flatnonzero(touched & (length < least))
        stays = touched.copy()
        stays[short] = False
        rows = np.flatnonzero(stays)
        self.fates.close(
            stage,
            removals=[
                Removal(
                    rows=short,
                    rule=rule,
                    value=length[short].astype(np.float64),
                    threshold=np.full(len(short), least, np.float64),
                )
            ],
            edits=[Edits.of(rows, rule, removed[rows])],
            sizes=np.where(stays, left, self.fates.sizes),
        )
        self._cut_texts(stage, spans.where(stays))

    def _characters_left(self, spans: Spans, left: npt.NDArray[np.int64], *, least: int) -> npt.NDArray[np.int64]:
        """Characters left of documents that may have fewer than `least`; of others, whose `left` bytes are 4 times as
        many, the bytes."""
        spans = spans.where(left < 4 * least)
        length = left.copy()
        for texts, start, mine in zip(self.texts, self.corpus.starts, spans.by_chunk(self.corpus.starts), strict=False):
            if len(mine.rows):
                length[start + np.unique(mine.rows)] = characters_left(texts, mine)
        return length

    def _cut_texts(self, stage: str, spans: Spans) -> None:
        tasks: dict[int, CutTask] = {}
        sizes = self.corpus.bytes_by_chunk(self.fates.sizes, self.fates.left)
        for index, mine in enumerate(spans.by_chunk(self.corpus.starts)):
            if len(mine.rows):
                target = self.stages / "cut" / f"{cut_key(self.texts[index], mine)}.arrow"
                tasks[index] = CutTask(self.texts[index], mine, sizes[index], target)
        if tasks:
            self.workers.run(f"{stage}: cut", cut_texts, list(tasks.values()), progress=self.progress)
        for index, task in tasks.items():
            self.texts[index] = self.texts[index].under(task.target)
