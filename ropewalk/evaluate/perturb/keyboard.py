"""Slips of the fingers."""

from __future__ import annotations

import random
import re

from .word_lists import mapping

_TYPOS = 5
"""Percent."""
_SWAPS = 0.1


def typos(text: str, draw: random.Random, strength: float) -> str:
    """Keys near the right one, which may be that key itself. Equals `butter_fingers_perturbation` of NL-Augmenter with
    prob=0.05 for `random.Random(seed)` and strength 1."""
    keys, most = {**mapping("keyboard"), " ": " "}, int(_TYPOS * strength)
    found = []
    for letter in text:
        low = letter.lower()
        near = keys.get(low)
        # Two draws per hit, in the order of the reference; its `<=` makes 6 % of 5 %.
        new = draw.choice(near) if near and draw.choice(range(100)) <= most else low
        found.append(new if low == letter else new.upper())
    return "".join(found)


def swapped_letters(text: str, draw: random.Random, strength: float) -> str:
    """Words of at least four letters, each with two neighbouring inner letters in the wrong order."""

    def swap(found: re.Match[str]) -> str:
        word = found[0]
        places = [index for index in range(1, len(word) - 2) if word[index] != word[index + 1]]
        if not places or draw.random() >= _SWAPS * strength:
            return word
        place = draw.choice(places)
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]

    return re.sub(r"[^\W\d_]{4,}", swap, text)
