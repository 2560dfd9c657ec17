"""Small studies: runs with samples, sheets that raters have filled in."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropewalk.base.seal import sealed_lines


def write_run(folder: Path, *, prompts: int = 12, reference: bool = True, words: str = "model") -> Path:
    """A run directory with nothing but samples."""
    rows = [
        {
            "prompt": f"Prompt {number}, which begins",
            "completion": f" as text {number} of {folder.name} by a {words}.",
            "domain": "prose",
            "source": "book",
            "parses": None,
            "parses_reference": None,
            **({"reference": f" as text {number} by an author."} if reference else {}),
        }
        for number in range(prompts)
    ]
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_bytes(sealed_lines(rows))
    return folder


Score = Callable[[str, str, dict[str, Any], dict[str, Any]], object]
"""(rater, question, item of the key, line of the key) -> what the rater writes."""


def fill(folder: Path, rater: str, score: Score) -> Path:
    """Fills the CSV sheet of a rater."""
    key = json.loads((folder / "key.json").read_text())
    lines = {line["id"]: line for line in key["sheets"][rater]}
    with (folder / f"sheet-{rater}.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        line = lines[row["id"]]
        for question in key["form"]["questions"]:
            row[question["name"]] = str(score(rater, question["name"], key["items"][line["item"]], line))
    path = folder / f"filled-{rater}.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def by_system(rater: str, question: str, item: dict[str, Any], line: dict[str, Any]) -> int:
    """Texts by people get 5 or 4, others 1 or 2."""
    odd = item["prompt"] % 2
    return 5 - odd if item["systems"][0] == "human" else 1 + odd
