"""Stop strings, wherever tokens begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.evaluate.decode.stop_strings import StopStrings, cut, pieces_before

WORDS = ["a", "b", "ab", "ba\n", "", "\n\n", "aab", "绳", "aaaaaaaaaaab"]
TEXTS = st.lists(st.sampled_from("ab\n绳"), min_size=1, max_size=6).map("".join)


def spelled(tokens: list[int]) -> str:
    """Numbers below 200 are words; three from 200 on are the bytes of a character, which lacks some before the last."""
    data = b"".join(WORDS[t % len(WORDS)].encode() if t < 200 else "索".encode()[t % 3 : t % 3 + 1] for t in tokens)
    return data.decode(errors="replace")


def tokens_of(words: list[int]) -> list[int]:
    return [token for word in words for token in ([word] if word < 9 else [201, 202, 203])]


@given(st.lists(st.integers(0, 9), max_size=40).map(tokens_of), st.lists(TEXTS | st.just("索"), min_size=1, max_size=3))
def test_a_growing_text_ends_at_the_first_stop_string_with_the_fewest_tokens(
    tokens: list[int], stops: list[str]
) -> None:
    finder = StopStrings(stops, spelled)
    found = next((end for end in range(1, len(tokens) + 1) if finder.shortened(tokens[:end]) is not None), None)
    # The first place where a look at the whole text finds one.
    first = next((n for n in range(1, len(tokens) + 1) if any(stop in spelled(tokens[:n]) for stop in stops)), None)
    assert found == first
    if first is not None:
        before = cut(spelled(tokens[:first]), stops)
        shorter = finder.shortened(tokens[:first])
        assert shorter == min((tokens[:n] for n in range(first + 1) if spelled(tokens[:n]).startswith(before)), key=len)


@given(st.lists(TEXTS, max_size=12), st.lists(TEXTS, min_size=1, max_size=3))
def test_pieces_give_the_text_before_a_stop_string_and_never_take_any_back(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    ends = [next((n for n in range(len(text) + 1) if text[:n].endswith(stop)), len(text) + 1) for stop in stops]
    before = cut(text[: min(ends)], stops)
    # In one text, a stop string that ends later may begin earlier; a stream has ended by then.
    assert "".join(pieces_before(iter(text), stops)) == before
    assert cut(text, stops).startswith("".join(pieces_before(pieces, stops))[: len(cut(text, stops))])
    assert "".join(pieces_before(pieces, [])) == text


@pytest.mark.parametrize(("stop", "shown"), [("User:", "well. "), ("Us", "well. "), ("zz", "well. User: no")])
def test_what_may_begin_a_stop_string_is_held_back(stop: str, shown: str) -> None:
    assert "".join(pieces_before(["well", ". U", "ser", ": no"], [stop])) == shown
