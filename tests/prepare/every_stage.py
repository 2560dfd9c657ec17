"""A corpus and settings that put every stage of prepare to work."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ropewalk.prepare.config import (
    C4,
    Chat,
    Deduplicate,
    Filter,
    Gopher,
    Language,
    Near,
    Ngrams,
    Prepare,
    RefinedWeb,
    Repetition,
    Source,
    Substring,
    Tokenizer,
    WordList,
)

TALK = """
rope hemp fibre strand walk hall comb spin lay tar the of and with that long thin strong wet dry ship mast sail
knot loop bend hitch splice yarn twist turn pull hold break mend old new north south
"""
WORDS = TALK.split()


def prose(random: random.Random, sentences: int) -> str:
    """Running text: sentences in paragraphs of three lines."""
    lines = []
    for number in range(sentences):
        words = random.choices(WORDS, k=random.randint(6, 14))
        lines.append(" ".join(words).capitalize() + ".")
        if number % 3 == 2:
            lines.append("")
    return "\n".join(lines) + "\n"


def _touched(text: str) -> str:
    """`text` with one word of every paragraph changed."""
    return "\n\n".join(paragraph.replace(" ", " quite ", 1) for paragraph in text.split("\n\n"))


def write_corpus(folder: Path, *, documents: int = 60) -> None:
    """Documents, exact and near copies, shared paragraphs and passages, menus, dialogues, a file to be split, one of
    which blocks are held out, things that are no text."""
    draw = random.Random(7)
    texts = [prose(draw, draw.randint(8, 30)) for _ in range(documents)]
    shared, long_line = prose(draw, 9), " ".join(draw.choices(WORDS, k=60)) + ".\n"
    texts += [texts[3], texts[4]]  # equal
    texts += [_touched(text) for text in texts[5:9]]  # near
    texts += [prose(draw, 6) + "\n" + shared + "\n" + prose(draw, 6) for _ in range(4)]  # a shared paragraph
    texts += [prose(draw, 1) + long_line + prose(draw, 8) for _ in range(3)]  # a shared line
    texts += [prose(draw, 6).replace(".", f" {shared[:90]}.", 1) for _ in range(3)]  # a shared span
    texts += ["Home\nMenu\n3 likes\n" + prose(draw, 12) for _ in range(3)]  # corrected lines
    texts += ["too short\n", "forbidden words\n" * 30, "1 2 3\n" * 60]
    places = folder / "texts"
    places.mkdir(parents=True)
    for number, text in enumerate(texts):
        (places / f"{number:03}.txt").write_text(text, "utf-8")
    (places / "binary.txt").write_bytes(b"\0" * 500)
    (places / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    lines = [json.dumps({"text": prose(draw, 12), "url": f"https://example.org/{n}"}) for n in range(40)]
    (folder / "lines.jsonl").write_text("\n".join([*lines, "{broken", lines[0]]) + "\n", "utf-8")
    turns = [
        [{"role": "user", "content": prose(draw, 2)}, {"role": "assistant", "content": prose(draw, 6)}]
        for _ in range(12)
    ]
    dialogues = [json.dumps({"messages": messages}) for messages in turns]
    (folder / "talk.jsonl").write_text("\n".join(dialogues) + "\n", "utf-8")
    chapters = [f"# Chapter {number}\n\n{prose(draw, 12)}" for number in range(12)]
    (folder / "chapters.md").write_text("\n".join(chapters), "utf-8")
    (folder / "novel.txt").write_text(prose(draw, 300), "utf-8")
    (folder / "words.txt").write_text("# never\nforbidden words\n", "utf-8")


def every_stage(*, folder: str, workers: int = 1) -> Prepare:
    """Settings with every stage switched on, for the working folder that `write_corpus` filled."""
    return Prepare(
        sources=(
            Source(name="texts", paths=("texts",), domain="prose"),
            Source(name="lines", paths=("lines.jsonl",)),
            Source(name="talk", paths=("talk.jsonl",), format="chat"),
            Source(name="chapters", paths=("chapters.md",), split="headings"),
            Source(name="novel", paths=("novel.txt",)),
        ),
        filter=Filter(
            min_characters=100,
            gopher=Gopher(min_words=20, min_stop_words=1),
            repetition=Repetition(),
            c4=C4(min_sentences=2, terminal_punctuation=False, min_line_words=1),
            refinedweb=RefinedWeb(max_flagged_word_share=0.5),
            language=Language(min_confidence=0.01),
            words=WordList(files=("words.txt",)),
        ),
        deduplicate=Deduplicate(
            paragraphs=True,
            lines=True,
            min_piece_bytes=100,
            near=Near(threshold=0.7, max_removed_share=0.9),
            substring=Substring(action="remove", length=60, min_remaining_bytes=50),
        ),
        tokenizer=Tokenizer(vocab_size=400, train_bytes=20_000),
        chat=Chat(),
        ngrams=Ngrams(unit="words", length=5),
        validation_share=0.2,
        shard_tokens=3000,
        workers=workers,
        folder=folder,
    )
