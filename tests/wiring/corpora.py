"""The raw texts of the tiny runs: some good documents, and one for every rule."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path

from tests.tiny import write_corpus

WORDS = (
    *("the", "be", "to", "of", "and", "that", "have", "with", "rope", "walk", "strand", "yarn", "hemp", "twist"),
    *("lay", "comb", "spin", "tar", "hall", "knot", "fibre", "cable", "hawser", "long", "under", "every", "winter"),
)


def prose(seed: int, *, sentences: int = 8, words: int = 11, ends: str = ".") -> str:
    """Lines of one sentence each, of words drawn by the seed."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=words)) for _ in range(sentences)]
    return "\n".join(line.capitalize() + ends for line in lines)


def documents() -> dict[str, str]:
    """By name: texts that pass every rule by default, and texts that are near a threshold of one."""
    found = {f"good-{n}": prose(n, sentences=6 + n % 7) for n in range(12)}
    found |= {
        "short": "Only four words here.",
        "digits": "\n".join(f"Item {n}: 12345 67890 31415 92653 58979 and the end of it." for n in range(9)),
        "doubled": prose(31, sentences=5) + "\n" + prose(31, sentences=2) + "\n" + prose(32, sentences=4),
        "paragraphs": "\n\n".join([prose(33, sentences=3), prose(34, sentences=3), prose(33, sentences=3), prose(35)]),
        "phrase": "\n".join(f"{prose(40 + n, sentences=1)} The long rope of the winter hall." for n in range(8)),
        "passage": prose(36, sentences=6) + " " + " ".join(prose(36, sentences=2).lower().split()),
        "hashes": prose(37) + "\n" + "# " * 4 + "the tags.",
        "ellipses": prose(38, sentences=6) + "\n" + prose(39, sentences=2, ends="..."),
        "bullets": "\n".join(f"- {prose(50 + n, sentences=1)}" for n in range(6)) + "\n" + prose(51, sentences=3),
        "symbols": prose(52) + "\n" + " ".join(["the", "1234", "of", "5678"] * 3) + ".",
        "plain": "Rope hemp tar yarn knot cable hawser strand comb spin hall twist.\n" + prose(53),
        "shout": prose(54) + "\nTHE LONG ROPE OF WINTER IS UNDER THE HALL.",
        "menu": prose(55) + "\n12 / 34\n3 likes\nHome\nSign in to see the rope.\nThe whole knot read more\nThe rope, "
        "all rights reserved, is long.",
        "script": prose(56) + "\nPlease switch javascript on to see the rope.",
        "policy": prose(57) + "\nThis page has a privacy policy and uses cookies.",
        "cited": prose(58, sentences=7) + "\nThe rope is long [1] and the hemp is old [citation needed].",
        "lorem": prose(59) + "\nLorem ipsum is the beginning of every rope.",
        "braces": prose(60) + "\nThe rope { and the knot } are long and old.",
        "few": "\n".join([prose(61, sentences=3, words=30)]),
        "stretch": prose(62) + "\nThe rope is " + "x" * 1200 + " long.",
        "open": prose(63, sentences=4) + "\n" + prose(64, sentences=3, ends=""),
        "brief": prose(65, sentences=5) + "\nTwo words.\nThe rope.",
        "lists": "\n".join(["The rope.", "A knot of tar."] * 9) + "\n" + prose(66, sentences=12),
        "german": "Das Seil liegt in der langen Halle, und die Fasern werden zu Garn gesponnen. Der Winter ist kalt. "
        "Die Arbeiter drehen das Seil am Morgen und am Abend, und niemand spricht ein Wort dabei.",
        "mixed": "rope hemp le chanvre tar yarn der Knoten cable hawser spin la corde walk comb und Garn twist.",
        "copy": prose(3, sentences=9),
        "again": prose(3, sentences=9),
        "near": prose(70, sentences=12),
        "nearer": _reworded(prose(70, sentences=12)),
        "far": prose(70, sentences=8) + "\n" + prose(71, sentences=3),
        "repeat": prose(72, sentences=8) + "\n" + prose(70, sentences=6),
    }
    return found


def write_corpora(folder: Path) -> None:
    """The raw files and, for training, a prepared folder of two sources."""
    rows = [
        {
            "text": text,
            "body": text[::-1],
            "url": f"https://{'bad' if number % 7 == 3 else 'good'}.example/{name}",
            "link": f"https://other.example/{name}",
            "date": f"2020-01-{number % 28 + 1:02d}",
            "seen": "2021-05-05",
            "license": "CC0",
            "terms": "MIT",
        }
        for number, (name, text) in enumerate(documents().items())
    ]
    (folder / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bare = [{"text": row["text"]} for row in rows[:8]]
    (folder / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare), encoding="utf-8")
    other = [{"text": prose(400 + number)} for number in range(6)]
    (folder / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other), encoding="utf-8")
    (folder / "book.txt").write_text(_book(), encoding="utf-8")
    (folder / "page.html").write_text(f"<html><body><p>{prose(80)}</p></body></html>", encoding="utf-8")
    (folder / "nested.zip").write_bytes(_zipped("inner.zip", _zipped("page.txt", prose(81).encode())))
    (folder / "secret").write_text("a secret of some length", encoding="utf-8")
    (folder / "secret").chmod(0o600)
    (folder / "chat.jsonl").write_text("".join(json.dumps(_dialogue(n)) + "\n" for n in range(20)), encoding="utf-8")
    for name, entries in {"hosts": "bad.example", "words": "rope", "urls": "good-1", "soft": "good\nexample"}.items():
        (folder / f"{name}.txt").write_text(entries + "\n", encoding="utf-8")


def write_prepared(folder: Path) -> Path:
    """Random sentences of two sources, prepared."""
    return write_corpus(folder)


def _reworded(text: str) -> str:
    """With another word in its middle."""
    words = text.split(" ")
    return " ".join([*words[: len(words) // 2], "summer", *words[len(words) // 2 + 1 :]])


def _zipped(name: str, data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), data)
    return packed.getvalue()


def _book() -> str:
    parts = [f"# Chapter {n}\n\n{prose(90 + n, sentences=4)}\n\n{prose(100 + n, sentences=3)}\n---" for n in range(6)]
    return "\n".join(parts) + "\n"


def _dialogue(number: int) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": prose(200 + number, sentences=1)},
            {"role": "assistant", "content": prose(300 + number, sentences=2)},
        ],
    }
