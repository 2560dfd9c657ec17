"""Every rule as its paper says it, for one text: the names of those that it breaks."""

from __future__ import annotations

from ropewalk.prepare.config import Filter
from tests.prepare.slow_lines import c4, refinedweb
from tests.prepare.slow_statistics import measured


def corrected(text: str, settings: Filter) -> tuple[str, float]:
    """The text after line-wise corrections, and the share of its words that RefinedWeb's flagged."""
    share = 0.0
    if settings.refinedweb:
        text, words, flagged = refinedweb(text, settings.refinedweb)
        share = flagged / words if words else 0.0
    if settings.c4:
        text = c4(text, settings.c4)
    return text, share


def broken(text: str, settings: Filter, *, flagged_share: float = 0.0) -> list[str]:
    """The rules that a corrected text breaks, in order. A rule at its neutral value is off."""
    m = measured(text, settings.gopher.stop_words) if settings.gopher else measured(text)

    def share(part: str, whole: str) -> float:
        return m[part] / m[whole] if m[whole] else 0.0

    spaced = 2 * m["unsegmented_words"] <= m["words"]
    found = {
        "min_characters": m["characters"] < settings.min_characters,
        "max_characters": 0 < settings.max_characters < m["characters"],
        "max_mean_line_length": 0 < settings.max_mean_line_length < share("line_characters", "all_lines"),
        "min_letter_share": share("letters", "visible_characters") < settings.min_letter_share,
        "max_duplicate_line_share": share("duplicate_lines", "lines") > settings.max_duplicate_line_share,
    }
    if g := settings.gopher:
        length = share("word_characters", "words")
        found |= {
            "gopher.min_words": m["words"] < g.min_words,
            "gopher.max_words": 0 < g.max_words < m["words"],
            "gopher.min_mean_word_length": spaced and length < g.min_mean_word_length,
            "gopher.max_mean_word_length": spaced and 0 < g.max_mean_word_length < length,
            "gopher.max_hash_ratio": 1 > g.max_hash_ratio < share("hash_signs", "pieces"),
            "gopher.max_ellipsis_ratio": 1 > g.max_ellipsis_ratio < share("ellipses", "pieces"),
            "gopher.max_bullet_line_share": share("bullet_lines", "lines") > g.max_bullet_line_share,
            "gopher.max_ellipsis_line_share": share("ellipsis_lines", "lines") > g.max_ellipsis_line_share,
            "gopher.min_alphabetic_share": share("alphabetic_words", "pieces") < g.min_alphabetic_share,
            "gopher.min_stop_words": spaced and m["stop_words"] < g.min_stop_words,
        }
    if r := settings.repetition:
        found |= {
            "repetition.max_duplicate_paragraph_share": share("duplicate_paragraphs", "paragraphs")
            > r.max_duplicate_paragraph_share,
            "repetition.max_duplicate_paragraph_character_share": share("duplicate_paragraph_characters", "characters")
            > r.max_duplicate_paragraph_character_share,
            "repetition.max_duplicate_line_share": share("duplicate_lines", "lines") > r.max_duplicate_line_share,
            "repetition.max_duplicate_line_character_share": share("duplicate_line_characters", "characters")
            > r.max_duplicate_line_character_share,
        }
        for kind, orders in (("top", (2, 3, 4)), ("duplicate", range(5, 11))):
            for n in orders:
                most = getattr(r, f"max_{kind}_{n}_gram_share")
                name = f"repetition.max_{kind}_{n}_gram_share"
                found[name] = 1 > most < share(f"{kind}_{n}_gram_characters", "characters")
    if c := settings.c4:
        found |= {
            "c4.lorem_ipsum": c.lorem_ipsum and m["lorem_ipsum_lines"] > 0,
            "c4.curly_brackets": c.curly_brackets and "{" in text,
            "c4.min_sentences": m["sentences"] < c.min_sentences,
            "c4.min_long_lines": m["long_lines"] < c.min_long_lines,
        }
    if f := settings.fineweb:
        found |= {
            "fineweb.min_terminal_line_share": share("terminal_lines", "lines") < f.min_terminal_line_share,
            "fineweb.max_short_line_share": share("short_lines", "lines") > f.max_short_line_share,
            "fineweb.max_duplicate_character_share": share("duplicate_line_characters", "line_characters")
            > f.max_duplicate_character_share,
            "fineweb.max_line_ends_per_word": 0 < f.max_line_ends_per_word < share("line_ends", "pieces"),
        }
    if w := settings.refinedweb:
        found["refinedweb.max_flagged_word_share"] = flagged_share > w.max_flagged_word_share
    return [name for name, breaks in found.items() if breaks]
