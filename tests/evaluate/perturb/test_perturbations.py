"""Perturbations of texts: what changes, what never does, and agreement with NL-Augmenter."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from ropewalk.base.errors import ConfigError, UserError
from ropewalk.evaluate.perturb.chinese import in_characters
from ropewalk.evaluate.perturb.config import PERTURBATIONS, SUITES
from ropewalk.evaluate.perturb.numerals import in_words
from ropewalk.evaluate.perturb.perturbation import Perturbation, open_perturbations
from ropewalk.evaluate.perturb.word_lists import word_list
from ropewalk.evaluate.question_task import Question

REFERENCES = Path(__file__).parents[4] / "shared" / "data" / "refs" / "nl-augmenter-tests.jsonl"
NAMES = [name for name in PERTURBATIONS if name not in SUITES]

ENGLISH = (
    'Dr. Smith isn\'t sure, however: "Does it not begin often in the theatre?" For example, she buys 12 big apples '
    "and twenty-three small ones on 8 August 1981 at the café of her favorite neighbour, e.g. in color, "
    "and it is entire. What do you think of the harbor?"
)
CHINESE = "在这个公园里，小明有12个苹果，其实他吃了三个,还有ABC和５个梨子没有吃；這個問題，你认为已经清楚了吗？"


def named(name: str, *, strength: float = 1.0, seed: int = 0) -> Perturbation:
    return open_perturbations([name], strength=strength, seed=seed)[0]


def change(name: str, text: str, *, strength: float = 1.0, seed: int = 0) -> str:
    return named(name, strength=strength).text(text, random.Random(seed))


def cases(transformation: str) -> list[tuple[str, list[str]]]:
    if not REFERENCES.exists():
        pytest.skip("no NL-Augmenter cases here")
    rows = map(json.loads, REFERENCES.read_text("utf-8").splitlines())
    (found,) = [row["test_cases"] for row in rows if row["transformation"] == transformation]
    return [(case["inputs"]["sentence"], [each["sentence"] for each in case["outputs"]]) for case in found]


AGREEING = {
    # transformation: our names, cases that agree, all cases
    "butter_fingers_perturbation": (["typos"], 5, 5),
    "contraction_expansions": (["contractions", "expansions"], 7, 7),
    "diacritic_removal": (["no_diacritics"], 5, 6),
    "chinese_simplified_traditional_perturbation": (["traditional"], 5, 5),
    "americanize_britishize_english": (["british_spelling", "american_spelling"], 1, 4),
    "numeric_to_word": (["number_words"], 12, 80),
}
"""Where fewer agree, NL-Augmenter also swaps words (shop, store), reads times, sums and formulas aloud, or drops
subscripts."""


@pytest.mark.parametrize("transformation", AGREEING)
def test_cases_of_nl_augmenter_come_out_the_same(transformation: str) -> None:
    names, agreeing, total = AGREEING[transformation]
    found = cases(transformation)
    functions = [PERTURBATIONS[name].load() for name in names]
    same = [any(each(text, random.Random(0), 1.0) in wanted for each in functions) for text, wanted in found]
    assert (sum(same), len(same)) == (agreeing, total)


def test_butter_fingers_come_out_the_same_where_numbers_and_labels_are_protected() -> None:
    same = [change("typos", text) in wanted for text, wanted in cases("butter_fingers_perturbation")]
    assert same.count(True) >= 4, "digits of `33rd` draw no random number"


def test_typos_follow_the_definition_of_butter_fingers() -> None:
    text = "Ropes are laid from strands, and strands from yarns; Zürich sells both for 12 francs." * 3
    keys = dict(word_list("keyboard"))
    random.seed(7)
    wanted = ""
    for letter in text:
        known = letter.lower() in keys or letter == " "
        typed = letter.lower()
        if known and random.choice(range(100)) <= 5:
            typed = random.choice(keys.get(letter.lower(), " "))
        wanted += typed.upper() if letter.isupper() else typed
    found = PERTURBATIONS["typos"].load()(text, random.Random(7), 1.0)
    assert found == wanted != text


def test_there_are_at_least_fifteen_and_both_languages_have_some() -> None:
    languages = [PERTURBATIONS[name].language for name in NAMES]
    assert len(NAMES) >= 15
    assert languages.count("zh") >= 5
    assert {each.name for each in open_perturbations(["zh"], strength=1, seed=0)} == {
        name for name in NAMES if PERTURBATIONS[name].language in ("zh", "any")
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_perturbation_changes_a_text_of_its_language_the_same_way_for_the_same_seed(name: str) -> None:
    texts = [text for text in (ENGLISH, CHINESE) if change(name, text, strength=5) != text]
    assert texts, "it changes neither text"
    for text in texts:
        assert change(name, text, strength=5, seed=3) == change(name, text, strength=5, seed=3)
    other = {"en": CHINESE, "zh": ENGLISH}.get(PERTURBATIONS[name].language, "")
    assert change(name, other, strength=5) == other


PROTECTED = [
    *("https://example.org/a,b?q=big", "`isn't_big(color)`", "{{question}}", "<answer>", "$a^2 + big$", "____"),
    *("\nA. ", "\nB) ", "(C) ", "\nQuestion: ", "\nAnswer: ", "\n    return big\n", "me.big@example.org"),
]


@pytest.mark.parametrize("name", NAMES)
def test_code_urls_placeholders_and_labels_stay(name: str) -> None:
    for base in (ENGLISH, CHINESE):
        text = base.join(["", *(f" {each} " for each in PROTECTED), ""])
        found = change(name, text, strength=5)
        assert [found.count(each) for each in PROTECTED] == [text.count(each) for each in PROTECTED]


@pytest.mark.parametrize("name", [name for name in NAMES if not PERTURBATIONS[name].rewrites_numbers])
def test_numbers_stay(name: str) -> None:
    text = "You buy 12 big apples, 3.50 francs each, in 2012, and isn't 1,234 the sum of 40% and 3x or x2? "
    found = change(name, text * 4, strength=5)
    assert re.findall(r"[\d.,%x]*\d[\d.,%x]*", found) == re.findall(r"[\d.,%x]*\d[\d.,%x]*", text * 4)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("swapped_letters", "it is so", "it is so"),
        ("expansions", "It's been cold and it's late.", "It's been cold and it is late."),
        ("contractions", "I am sure, yes, it is. Do not go.", "I'm sure, yes, it is. Don't go."),
        ("american_spelling", "COLOURS and Colour", "COLORS and Color"),
        ("abbreviations", "We met on Monday, for example.", "We met on Mon., e.g."),
        ("full_forms", "We met on Mon., and he sat. e.g. here", "We met on Monday, and he sat. for example here"),
        ("number_words", "He has 21 cats, $5, page 3, 5:30, 007 and 3.5 in 1999.", None),
        ("digits", "Twenty-one of them, one hundred and five, two three", "21 of them, 105, two three"),
        ("digits", "One of us has a hundred", "One of us has a hundred"),
        ("dates", "12/11/2010", "12/11/2010"),
        ("curly_quotes", "He said \"it's 'odd'\"", "He said “it’s ‘odd’”"),
        ("more_marks", "The capital of France is", "The capital of France is"),
        ("politeness", "The capital of France is", "The capital of France is"),
        ("fewer_marks", "Who?\nAnswer:", "Who\nAnswer:"),
        ("no_diacritics", "naïve Čapek 中文 が", "naive Capek 中文 が"),
        ("chinese_numbers", "他在2012年买了105个和3.5斤，共20元", "他在2012年买了一百零五个和3.5斤，共二十元"),
        ("arabic_numbers", "二十三个人和一个人，两万零五本，千万别去", "23个人和一个人，20005本，千万别去"),
        ("full_width", "有12个, 对吗?是(的)", "有１２个， 对吗？是（的）"),
        ("simplified", "這個問題", "这个问题"),
    ],
)
def test_what_is_rewritten(name: str, text: str, wanted: str | None) -> None:
    wanted = wanted or "He has twenty-one cats, $5, page 3, 5:30, 007 and 3.5 in 1999."
    assert PERTURBATIONS[name].load()(text, random.Random(0), 1.0) == wanted


def test_dates_keep_their_day() -> None:
    forms = {change("dates", "born on 8 August 1981.", seed=seed) for seed in range(9)}
    assert forms == {"born on August 8, 1981.", "born on 1981-08-08."}
    assert change("dates", "born on 1981-08-08.", seed=1)[8:] in ("8 August 1981.", "August 8, 1981.")


def test_numbers_in_words_and_characters_are_read_back() -> None:
    digits, arabic = PERTURBATIONS["digits"].load(), PERTURBATIONS["arabic_numbers"].load()
    for number in [*range(2, 1200), 10_001, 20_010, 100_100, 999_999]:
        assert digits(in_words(number), random.Random(0), 1.0) == str(number)
        assert arabic(in_characters(number) + "个", random.Random(0), 1.0) == f"{number}个"


def test_word_lists_hold_each_form_once_and_scripts_have_equal_lengths() -> None:
    for name in ("synonyms", "homophones", "shapes"):
        forms = [form for line in word_list(name) for each in line for form in (each if name != "synonyms" else [each])]
        assert len(forms) == len({*forms}), name
    for simple, full in word_list("traditional"):
        assert len(simple) == len(full)


def test_answers_in_the_prompt_stay_and_other_fields_too() -> None:
    question = Question(
        prompt="Passage: the color of the big harbor. Which color is it?\nA. color\nB. big harbor\nAnswer:",
        preamble="Choose the color.\n\n",
        choices=(" A", " B"),
        references=("big harbor",),
        gold=(1,),
    )
    found = named("upper_case").question(question)
    assert found is not None
    assert found.prompt == "Passage: THE COLOR OF THE big harbor. WHICH COLOR IS IT?\nA. COLOR\nB. big harbor\nAnswer:"
    assert (found.preamble, found.choices, found.references) == (
        question.preamble,
        question.choices,
        question.references,
    )


def test_an_answer_that_overlaps_a_number_stays_whole() -> None:
    question = Question(prompt="Is it 5 km or 7 km?", references=("5 km",))
    found = named("full_forms").question(question)
    assert found is not None
    assert found.prompt == "Is it 5 km or 7 kilometers?"


def test_contexts_change_alike_and_keep_what_tells_them_apart() -> None:
    shots = "The cat slept because the cat was tired.\n\n"
    contexts = tuple(f"{shots}The trophy is in the case because the {each} was big" for each in ("trophy", "case"))
    question = Question(prompt="", preamble=shots, contexts=contexts, choices=(" enough.", " enough."))
    found = named("upper_case").question(question)
    assert found is not None
    assert found.contexts == (
        f"{shots}THE TROPHY IS IN THE CASE BECAUSE THE trophy WAS BIG",
        f"{shots}THE TROPHY IS IN THE CASE BECAUSE THE case WAS BIG",
    )


def test_what_cannot_be_changed_is_none_and_the_same_question_always_changes_alike() -> None:
    assert named("upper_case").question(Question(prompt="12 + 30 =")) is None
    question = Question(prompt=ENGLISH)
    first, second = (named("typos", seed=seed).question(question) for seed in (1, 1))
    assert first == second != named("typos", seed=2).question(question)


def test_each_question_draws_its_own_changes() -> None:
    found = [named("typos").question(Question(prompt=ENGLISH, references=(each,))) for each in ("x1", "x2")]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].prompt != found[1].prompt


def test_a_perturbation_of_ones_own_is_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "words_of_ones_own.py").write_text(
        "def shouted(text, draw, strength):\n    return text + '!'\n\ndef broken(text, draw, strength):\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    found = named("words_of_ones_own:shouted").question(Question(prompt="Is it 3?"))
    assert found is not None
    assert (found.prompt, named("words_of_ones_own:shouted").name) == ("Is it 3?!", "words_of_ones_own:shouted")
    with pytest.raises(UserError, match=r"broken.*must return text, not int"):
        named("words_of_ones_own:broken").question(Question(prompt="x"))
    with pytest.raises(ConfigError, match='did you mean "typos"'):
        named("typo")


def test_a_perturbation_that_loses_a_protected_span_changes_nothing() -> None:
    def lost(text: str, draw: random.Random, strength: float) -> str:
        return text[:3]

    broken = Perturbation(name="x", change=lost, language="any", rewrites_numbers=False, strength=1, seed=0)
    assert broken.text("abcd 12", random.Random(0)) == "abcd 12"
    question = Question(prompt="", contexts=("It is big red.", "It is small red."), choices=(" a", " b"))
    assert broken.question(question) is None
