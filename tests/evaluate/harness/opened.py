"""Opens task files without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ropewalk.base.progress import Silent
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.harness.datasets import DataSets
from ropewalk.evaluate.harness.prompts import ChatTemplate
from ropewalk.evaluate.harness.task_file import read_task_file
from ropewalk.evaluate.harness.yaml_task import TaskSettings, YamlTask
from ropewalk.evaluate.held_out import HeldOut

FOLDER = Path(__file__).parent / "tasks"


class NoCorpus:
    """What tasks written as YAML use of `HeldOut`."""

    def __init__(self, settings: Evaluate | None = None, chat_template: str = "") -> None:
        self.settings, self.seed, self.progress = settings or Evaluate(), 0, Silent()
        self.chat_template, self.end_of_text, self.detokenizer = chat_template, 0, self
        self.said: list[str] = []
        self.progress.say = self.said.append  # type: ignore[method-assign]

    def text(self, tokens: Sequence[int]) -> str:
        return "<end>"


def no_corpus(settings: Evaluate | None = None, *, chat_template: str = "") -> HeldOut:
    """A stand-in for the corpus, which tasks written as YAML do not read."""
    return cast(HeldOut, NoCorpus(settings, chat_template))


def opened(
    path: Path,
    *,
    data: Sequence[Path] = (),
    trusted: Sequence[Path] = (),
    shots: int = -1,
    chat: ChatTemplate | None = None,
) -> YamlTask:
    """The task of a file."""
    settings = TaskSettings(data=DataSets(data), trusted=tuple(trusted), shots=shots, chat=chat)
    return YamlTask(read_task_file(path), no_corpus(), settings)


def written(folder: Path, name: str, text: str, **rows: Sequence[dict[str, Any]]) -> Path:
    """A task file in `folder`, with data files NAME.jsonl of the given rows beside it."""
    import json

    for split, own in rows.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in own)
        (folder / f"{split}.jsonl").write_text("".join(lines), "utf-8")
    path = folder / name
    path.write_text(text, "utf-8")
    return path
