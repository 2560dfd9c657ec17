"""The table of perturbations."""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.config.registry import Kind, Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class PerturbationKind(Kind):
    """How a perturbation is used. A user's function may have attributes of these names."""

    language: str = "any"
    """`en`, `zh` or `any`: texts of another language stay as they are."""
    rewrites_numbers: bool = False
    """Whether it sees numbers, which are protected from the others."""


def _kind(target: str, doc: str, language: str = "any", *, rewrites_numbers: bool = False) -> PerturbationKind:
    return PerturbationKind(target=target, doc=doc, language=language, rewrites_numbers=rewrites_numbers)


SUITES = ("all", "en", "zh")
"""Names that stand for several perturbations."""

PERTURBATIONS = Registry(
    "perturbation",
    {
        "all": _kind("ropewalk.evaluate.perturb.perturbation:unchanged", "Every built-in perturbation."),
        "en": _kind(
            "ropewalk.evaluate.perturb.perturbation:unchanged", "Every built-in perturbation that can change English."
        ),
        "zh": _kind(
            "ropewalk.evaluate.perturb.perturbation:unchanged", "Every built-in perturbation that can change Chinese."
        ),
        "typos": _kind(
            "ropewalk.evaluate.perturb.keyboard:typos", "5 % of letters become keys near them (butter fingers).", "en"
        ),
        "swapped_letters": _kind(
            "ropewalk.evaluate.perturb.keyboard:swapped_letters", "10 % of words have two inner letters swapped.", "en"
        ),
        "lower_case": _kind("ropewalk.evaluate.perturb.letters:lower_case", "All letters in lower case.", "en"),
        "upper_case": _kind("ropewalk.evaluate.perturb.letters:upper_case", "All letters in capitals.", "en"),
        "title_case": _kind("ropewalk.evaluate.perturb.letters:title_case", "Each word begins with a capital.", "en"),
        "extra_spaces": _kind(
            "ropewalk.evaluate.perturb.letters:extra_spaces", "10 % of spaces become two or three.", "en"
        ),
        "no_diacritics": _kind(
            "ropewalk.evaluate.perturb.letters:no_diacritics", "Letters without accents: `café`, `cafe`.", "en"
        ),
        "contractions": _kind("ropewalk.evaluate.perturb.english:contractions", "`do not` becomes `don't`.", "en"),
        "expansions": _kind("ropewalk.evaluate.perturb.english:expansions", "`don't` becomes `do not`.", "en"),
        "fillers": _kind(
            "ropewalk.evaluate.perturb.english:fillers", "Filler words between 5 % of words: `you know`.", "en"
        ),
        "synonyms": _kind(
            "ropewalk.evaluate.perturb.english:synonyms", "Half of the words in a small list become synonyms.", "en"
        ),
        "british_spelling": _kind(
            "ropewalk.evaluate.perturb.english:british_spelling", "`color` becomes `colour`.", "en"
        ),
        "american_spelling": _kind(
            "ropewalk.evaluate.perturb.english:american_spelling", "`colour` becomes `color`.", "en"
        ),
        "abbreviations": _kind(
            "ropewalk.evaluate.perturb.english:abbreviations", "`for example` becomes `e.g.`, `Monday` `Mon.`", "en"
        ),
        "full_forms": _kind("ropewalk.evaluate.perturb.english:full_forms", "`e.g.` becomes `for example`.", "en"),
        "number_words": _kind(
            "ropewalk.evaluate.perturb.numerals:number_words", "`12` becomes `twelve`.", "en", rewrites_numbers=True
        ),
        "digits": _kind(
            "ropewalk.evaluate.perturb.numerals:digits", "`twelve` becomes `12`.", "en", rewrites_numbers=True
        ),
        "dates": _kind(
            "ropewalk.evaluate.perturb.numerals:dates",
            "`8 August 1981` becomes `August 8, 1981`.",
            "en",
            rewrites_numbers=True,
        ),
        "fewer_marks": _kind(
            "ropewalk.evaluate.perturb.punctuation:fewer_marks",
            "Without the last mark, and without half of the commas.",
        ),
        "more_marks": _kind(
            "ropewalk.evaluate.perturb.punctuation:more_marks", "A mark at the end, or the last one doubled."
        ),
        "curly_quotes": _kind(
            "ropewalk.evaluate.perturb.punctuation:curly_quotes", "Typographic quotes and apostrophes.", "en"
        ),
        "politeness": _kind(
            "ropewalk.evaluate.perturb.punctuation:politeness",
            "Questions begin with a request: `Could you please tell me:`",
        ),
        "homophones": _kind(
            "ropewalk.evaluate.perturb.chinese:homophones",
            "10 % of listed characters become others of the same sound.",
            "zh",
        ),
        "similar_shapes": _kind(
            "ropewalk.evaluate.perturb.chinese:similar_shapes", "10 % of listed characters become similar ones.", "zh"
        ),
        "traditional": _kind("ropewalk.evaluate.perturb.chinese:traditional", "Traditional characters.", "zh"),
        "simplified": _kind("ropewalk.evaluate.perturb.chinese:simplified", "Simplified characters.", "zh"),
        "full_width": _kind(
            "ropewalk.evaluate.perturb.chinese:full_width", "Full-width digits and marks.", "zh", rewrites_numbers=True
        ),
        "half_width": _kind(
            "ropewalk.evaluate.perturb.chinese:half_width", "Half-width digits and marks.", "zh", rewrites_numbers=True
        ),
        "chinese_numbers": _kind(
            "ropewalk.evaluate.perturb.chinese:chinese_numbers", "`12` becomes `十二`.", "zh", rewrites_numbers=True
        ),
        "arabic_numbers": _kind(
            "ropewalk.evaluate.perturb.chinese:arabic_numbers", "`十二个` becomes `12个`.", "zh", rewrites_numbers=True
        ),
        "particles": _kind(
            "ropewalk.evaluate.perturb.chinese:particles", "Filler words after 30 % of commas: `其实`.", "zh"
        ),
    },
    kind=PerturbationKind,
)
"""Transformations of a text that keep its meaning: functions `(text, draw, strength) -> text`."""
