"""Every statistic written the plain way: strings, regular expressions and `unicodedata`, one document at a time.

The compiled pass must give the same numbers. Nothing here is shared with it but the definitions in words.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
BULLETS = "-•‣⁃◦∙▪■□●○"
JOINERS = "\u200c\u200d\u00ad"
UNSPACED = """
    0E00-0EFF 1000-109F 1780-17FF 1950-19FF 1A20-1AAF 1B00-1B7F 2E80-2FDF 3000-312F 31A0-31FF 3400-4DBF 4E00-A4CF
    A980-A9FF AA60-AADF F900-FAFF FF66-FF9F 1AFF0-1B16F 20000-3FFFF
"""
TERMINAL = (
    r"FULL STOP|QUESTION MARK|EXCLAMATION MARK|INTERROBANG|DANDA|TIBETAN.* SHAD|KHMER SIGN KHAN|MYANMAR SIGN.* SECTION"
)
NOT_TERMINAL = r"INVERTED|INITIAL|ARMENIAN (QUESTION|EXCLAMATION)|GREEK QUESTION|VERTICAL"


@functools.cache
def is_start(character: str) -> bool:
    return unicodedata.category(character)[0] in "LN"


@functools.cache
def is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M" or character in JOINERS


@functools.cache
def in_unspaced_block(character: str) -> bool:
    blocks = [block.split("-") for block in UNSPACED.split()]
    return any(int(first, 16) <= ord(character) <= int(last, 16) for first, last in blocks)


@functools.cache
def is_unspaced(character: str) -> bool:
    category = unicodedata.category(character)
    return (category[0] == "L" or category == "Nl") and in_unspaced_block(character)


@functools.cache
def is_terminal(character: str) -> bool:
    name = unicodedata.name(character, "")
    right = unicodedata.category(character) == "Po" and re.search(TERMINAL, name)
    return bool(right) and not re.search(NOT_TERMINAL, name)


@functools.cache
def is_wide_terminal(character: str) -> bool:
    wide = unicodedata.east_asian_width(character) in "WFH" or in_unspaced_block(character)
    return is_terminal(character) and wide


@functools.cache
def is_closing(character: str) -> bool:
    return unicodedata.category(character) in ("Pe", "Pf") or character in "\"'"


def spans(text: str) -> list[tuple[int, int]]:
    """Where the words of `text` stand."""
    found = []
    i = 0
    while i < len(text):
        begin = i
        i += 1
        if not is_start(text[begin]):
            continue
        while i < len(text):
            joined = is_start(text[i]) and not is_unspaced(text[i]) and not is_unspaced(text[begin])
            if not joined and not is_mark(text[i]):
                break
            i += 1
        found.append((begin, i))
    return found


def lowered(text: str) -> str:
    return "".join(
        c.lower() if len(c.lower()) == 1 and unicodedata.category(c) in ("Lu", "Lt", "Nl") else c for c in text
    )


def words_of(text: str) -> list[str]:
    return [lowered(text[a:b]) for a, b in spans(text)]


def symbols_of(text: str) -> list[str]:
    return [stretch for stretch in text.split() if not any(map(is_start, stretch))]


def lines_of(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def paragraphs_of(text: str) -> list[str]:
    rows = [line if line.strip() else "" for line in text.split("\n")]
    return [part.strip("\n") for part in re.split(r"\n{2,}", "\n".join(rows)) if part.strip("\n")]


def sentences_of(line: str) -> int:
    """One sentence, and one more for every pair of words between which one ends; none without a word."""
    places = spans(line)
    return len(places[:1]) + sum(sentence_ends(line, a, b) for (_, a), (b, _) in itertools.pairwise(places))


def sentence_ends(line: str, a: int, b: int) -> bool:
    """Whether a sentence ends between the word that ends at `a` and the next, which begins at `b`."""
    between = line[a:b]
    if any(map(is_wide_terminal, between)):
        return True
    for cluster, rest in marks_in(between)[-1:]:
        only_stops = {c for c in cluster if is_terminal(c)} == {"."}
        return rest[:1].isspace() and not (only_stops and unicodedata.category(line[b]) == "Ll")
    return False


def marks_in(between: str) -> list[tuple[str, str]]:
    """Marks with the closing quotes and brackets that follow, and what comes after them."""
    kinds = "".join("t" if is_terminal(c) else "c" if is_closing(c) else "." for c in between)
    return [(between[m.start() : m.end()], between[m.end() :]) for m in re.finditer("t[tc]*", kinds)]


def duplicates(items: list[str]) -> tuple[int, int]:
    copies = [item for place, item in enumerate(items) if item in items[:place]]
    return len(copies), sum(map(len, copies))


def written(words: list[str]) -> str:
    """The words as one writes them: a space between two, unless both are letters of a script without spaces."""
    text = words[0]
    for before, word in itertools.pairwise(words):
        text += word if is_unspaced(before[0]) and is_unspaced(word[0]) else " " + word
    return text


def top(words: list[str], n: int) -> int:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not grams:
        return 0
    gram, times = Counter(grams).most_common(1)[0]
    return times * len(written(list(gram)))


def repeated(words: list[str], n: int) -> int:
    seen = set()
    total = i = 0
    while i + n <= len(words):
        gram = tuple(words[i : i + n])
        if gram in seen:
            total += sum(map(len, gram))
            i += n
        else:
            seen.add(gram)
            i += 1
    return total


def holds(line: str, phrases: tuple[str, ...]) -> bool:
    """Whether the words of one of the phrases stand in a row in `line`."""
    return any(f" {phrase} " in " " + " ".join(words_of(line)) + " " for phrase in phrases)


def width(line: str) -> int:
    return len(line) + 2 * sum(map(is_unspaced, line))


def measured(text: str, stop_words: tuple[str, ...] = STOP_WORDS) -> dict[str, int]:
    words, lines, paragraphs = words_of(text), lines_of(text), paragraphs_of(text)
    line_copies, line_copy_characters = duplicates(lines)
    paragraph_copies, paragraph_copy_characters = duplicates(paragraphs)
    return {
        "bytes": len(text.encode()),
        "characters": len(text),
        "visible_characters": sum(not c.isspace() for c in text),
        "letters": sum(c.isalpha() for c in text),
        "line_ends": text.count("\n"),
        "line_characters": len(text.replace("\n", "")),
        "all_lines": len(text.removesuffix("\n").split("\n")) if text else 0,
        "lines": len(lines),
        "short_lines": sum(width(line) <= 30 for line in lines),
        "long_lines": sum(len(line) >= 200 for line in lines),
        "bullet_lines": sum(line.lstrip()[0] in BULLETS for line in lines),
        "ellipsis_lines": sum(line.rstrip().endswith(("...", "…")) for line in lines),
        "terminal_lines": sum(is_terminal(line.rstrip()[-1]) for line in lines),
        "lorem_ipsum_lines": sum(holds(line, ("lorem ipsum",)) for line in lines),
        "javascript_lines": sum(holds(line, ("javascript",)) for line in lines),
        "policy_lines": sum(holds(line, POLICY) for line in lines),
        "duplicate_lines": line_copies,
        "duplicate_line_characters": line_copy_characters,
        "paragraphs": len(paragraphs),
        "duplicate_paragraphs": paragraph_copies,
        "duplicate_paragraph_characters": paragraph_copy_characters,
        "sentences": sum(map(sentences_of, lines)),
        "words": len(words),
        "pieces": len(words) + len(symbols_of(text)),
        "unsegmented_words": sum(is_unspaced(word[0]) for word in words),
        "alphabetic_words": sum(any(map(str.isalpha, word)) for word in words),
        "word_characters": sum(map(len, words)),
        "stop_words": len(set(stop_words) & set(words)),
        "hash_signs": text.count("#"),
        "ellipses": text.count("...") + text.count("…"),
        "curly_brackets": text.count("{"),
        **{f"top_{n}_gram_characters": top(words, n) for n in (2, 3, 4)},
        **{f"duplicate_{n}_gram_characters": repeated(words, n) for n in range(5, 11)},
    }
