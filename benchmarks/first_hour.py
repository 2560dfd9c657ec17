"""The first hour of new users: their data, `ropewalk new`, `recipe check`, `run`, and at most one edited line.

    python benchmarks/first_hour.py                 every walk, as a user would; about two hours on two cores
    python benchmarks/first_hour.py --quick         few steps each; the files and what `prepare` does are the same
    python benchmarks/first_hour.py --only poems

Fails when a command does, when the filters remove more than 5 % of the documents (equal and near-equal ones are counted
apart), or when what is held out is less than half or more than twice of what the recipe asks for.

Corpora lie in ../shared/data, or in the folder that `--data` names; a walk whose corpus is missing is skipped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import machine

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
LEAST_KEPT = 0.95
QUICK_STEPS = 20
BOOK_BYTES = (300_000, 700_000, 1_500_000, 3_000_000, 7_000_000)
"""About the sizes of the five text files."""
CHATS = 800
WORDS = ("rope", "strand", "yarn", "fibre", "hemp", "knot", "splice", "sail", "mast", "anchor", "winter", "letter")
EQUAL = ("deduplicate", "near", "substring")
"""Steps of `prepare` that remove what is there twice."""


class MissingError(Exception):
    """The corpus of a walk is not here."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What one user does."""

    data: Callable[[Path, Path], list[str]]
    """Copies or makes the user's files; what `new` is given."""
    edit: tuple[str, str] | None = None
    """A line of the recipe, as a pattern, and what the user makes of it."""
    new: tuple[str, ...] = ()
    """Options of `new`."""
    before: tuple[tuple[str, ...], ...] = ()
    """Commands that come first; `STEPS` stands for fewer steps."""


def shakespeare(data: Path, here: Path) -> list[str]:
    return [copied(data / "tinyshakespeare" / "input.txt", here / "input.txt")]


def books(data: Path, here: Path) -> list[str]:
    """Five files: single books, and for the large ones several behind each other."""
    files = sorted((data / "classic-books-en").glob("*.jsonl.gz"))
    texts = sorted((row["text"] for file in files for row in rows(file)), key=len)
    if not texts:
        raise MissingError(data / "classic-books-en")
    (here / "books").mkdir()
    for number, wanted in enumerate(BOOK_BYTES):
        parts: list[str] = []
        while texts and sum(map(len, parts)) < 0.9 * wanted:
            fitting = [text for text in texts if len(text) <= wanted - sum(map(len, parts))] or texts[:1]
            parts.append(fitting[-1])
            texts.remove(fitting[-1])
        (here / "books" / f"{number}.txt").write_text("\n\n".join(parts), "utf-8", newline="")
    return ["books/"]


def poems(data: Path, here: Path) -> list[str]:
    return [copied(data / "chinese-poetry" / "poetry.jsonl.gz", here / "poetry.jsonl.gz")]


def parallel(data: Path, here: Path) -> list[str]:
    return [copied(data / "libreoffice-help-en-zh" / "pages.jsonl.gz", here / "pages.jsonl.gz")]


def chats(_: Path, here: Path) -> list[str]:
    (here / "chats.jsonl").write_text("".join(dialogues(random.Random(0))), "utf-8")
    return ["chats.jsonl"]


WALKS = {
    "shakespeare": Walk(data=shakespeare),
    "books": Walk(data=books),
    "poems": Walk(data=poems),
    "chats": Walk(data=chats),
    "parallel": Walk(data=parallel),
    "lora": Walk(
        data=chats,
        before=(
            ("quickstart", "STEPS"),
            ("model", "export", "runs/quickstart", "my-llama"),
        ),
        new=("--start-from", "my-llama"),
        edit=(r"^#\[train\.lora\]$", "[train.lora]"),
    ),
}
LONGER = "shakespeare"
"""The walk whose finished run goes on with more steps."""


def copied(source: Path, target: Path) -> str:
    if not source.exists():
        raise MissingError(source)
    target.write_bytes(source.read_bytes())
    return target.name


def rows(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def dialogues(draw: random.Random) -> Iterator[str]:
    """Short chats about sums, letters and lists, as somebody may have collected them."""
    for _ in range(CHATS):
        turns = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            some, a, b = draw.sample(WORDS, k=draw.randint(2, 6)), draw.randint(2, 999), draw.randint(2, 999)
            question, answer = draw.choice(
                (
                    (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
                    (f"Spell {some[0]} backwards.", some[0][::-1]),
                    (f"Sort these words: {', '.join(some)}.", f"In order: {', '.join(sorted(some))}."),
                    (f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger, by {abs(a - b)}."),
                    (
                        f"Write a line with {some[0]} and {some[1]}.",
                        f"The {some[0]} lay by the {some[1]} for {a} days.",
                    ),
                    ("你好！请把这些词排序：" + "、".join(some), "、".join(sorted(some))),
                )
            )
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield json.dumps({"messages": turns}, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class User:
    """Somebody at a shell in a folder."""

    folder: Path
    steps: int | None
    """Of training, in place of what a recipe says."""

    def does(self, *words: str) -> str:
        """Output of a command; SystemExit shows what a failing one said."""
        given = [self.short if word == "STEPS" else word for word in words]
        command = [word for word in given if word]
        print(f"  $ ropewalk {' '.join(command)}", flush=True)
        begun = time.monotonic()
        call = [sys.executable, "-m", "ropewalk", *command]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(call, cwd=self.folder, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
        for line in done.stderr.splitlines():
            if line.startswith("warning"):
                print(f"    {line}")
        print(f"    {time.monotonic() - begun:.0f} s", flush=True)
        return done.stdout

    @property
    def short(self) -> str:
        return f"train.steps={self.steps}" if self.steps else ""

    def edits(self, recipe: str, pattern: str, line: str) -> None:
        """One line of a recipe."""
        path = self.folder / recipe
        text, count = re.subn(pattern, line, path.read_text("utf-8"), count=1, flags=re.MULTILINE)
        assert count == 1, f"{recipe} has no line {pattern}"
        path.write_text(text, "utf-8")


def take(walk: Walk, user: User, data: Path, name: str) -> dict[str, Any]:
    """One walk; what came of it."""
    given = walk.data(data, user.folder)
    recipe = f"{name}.toml"
    for command in walk.before:
        user.does(*command)
    user.does("new", recipe, *given, *walk.new)
    if walk.edit:
        user.edits(recipe, *walk.edit)
    user.does("recipe", "check", recipe)
    summary = json.loads(user.does("run", recipe, "STEPS", "--json"))
    settings = json.loads(user.does("recipe", "show", f"runs/{name}", "--json"))
    prepared = json.loads(user.does("prepare", recipe, "STEPS", "--json"))
    manifest = json.loads((user.folder / prepared["folder"] / "manifest.json").read_text("utf-8"))
    return {
        **shares(manifest, asked=asked_share(settings)),
        "bits_per_byte": summary["bits_per_byte"],
        "warnings": summary["warnings"],
    }


def asked_share(settings: dict[str, Any]) -> float:
    return float(settings["config"]["prepare"]["validation_share"])


def shares(manifest: dict[str, Any], *, asked: float) -> dict[str, Any]:
    """What the filters kept of the documents, and how much is held out for what was asked."""
    steps = [step for source in manifest["sources"] for step in source["steps"]]
    documents = sum(source["steps"][0]["documents_in"] for source in manifest["sources"])
    equal = sum(step["documents_in"] - step["documents_out"] for step in steps if step["step"] in EQUAL)
    filtered = sum(step["documents_in"] - step["documents_out"] for step in steps if step["step"] not in EQUAL)
    tokens = {
        split: sum(s["tokens"] for s in manifest["shards"] if s["split"] == split) for split in ("train", "validation")
    }
    held_out = tokens["validation"] / sum(tokens.values())
    return {
        "documents": documents,
        "kept": 1 - filtered / documents,
        "equal": equal / documents,
        "held_out": held_out,
        "asked": asked,
    }


def judged(found: dict[str, Any]) -> list[str]:
    """What is wrong with a walk."""
    wrong = []
    if found["kept"] < LEAST_KEPT:
        wrong.append(f"the filters kept only {found['kept']:.1%} of the documents")
    if not 0.5 <= found["held_out"] / found["asked"] <= 2:
        wrong.append(f"{found['held_out']:.2%} are held out, for {found['asked']:.2%} asked")
    return wrong


def longer(user: User) -> dict[str, Any]:
    """A finished run goes on: one edited line, the same command."""
    recipe = f"{LONGER}.toml"
    done = user.steps or int(re.search(r"^steps = (\d+)$", (user.folder / recipe).read_text(), re.MULTILINE)[1])  # type: ignore[index]
    more = done + max(10, done // 4)
    user.edits(recipe, r"^steps = \d+$", f"steps = {more}")
    user.does("recipe", "check", recipe)
    user.does("run", recipe)
    reached = json.loads(user.does("monitor", f"runs/{LONGER}", "--json"))["step"]["step"]
    assert reached == more, f"the run ended at step {reached}, not {more}"
    return {"steps": more}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", choices=[*WALKS, "longer"], action="append")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps of training in each walk")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it")
    given = parser.parse_args()
    wanted = given.only or [*WALKS, "longer"]
    walks = [name for name in WALKS if name in wanted or (name == LONGER and "longer" in wanted)]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        home = given.keep or Path(scratch)
        for name in walks:
            print(name, flush=True)
            user = User(home / name, QUICK_STEPS if given.quick else None)
            user.folder.mkdir(parents=True)
            try:
                found = take(WALKS[name], user, given.data, name)
            except MissingError as missing:
                print(f"  skipped: {missing} is not here")
                continue
            results[name] = found | {"wrong": judged(found)}
            if name == LONGER and "longer" in wanted:
                results["longer"] = longer(user) | {"wrong": []}
    report(results)


def report(results: dict[str, Any]) -> None:
    for name, found in results.items():
        if "kept" in found:
            print(
                f"{name:<12} {found['documents']:>7,} documents  filters kept {found['kept']:.2%}  "
                f"equal {found['equal']:.2%}  held out {found['held_out']:.2%} of {found['asked']:.2%} asked  "
                f"{found['bits_per_byte']:.2f} bits per byte"
            )
        for line in found["wrong"]:
            print(f"{name:<12} WRONG: {line}")
    print(json.dumps({"name": "first_hour", "walks": results, "machine": machine()}))
    if any(found["wrong"] for found in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
