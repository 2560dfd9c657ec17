"""Ends completions at stop strings, which may begin and end inside tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

SLACK = 4
"""Characters at the beginning of a decoded window that may differ from those in the whole text: bytes of a character
whose first token is outside of it, a space that decoders remove."""


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def pieces_before(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """A text that comes in pieces, up to the first stop string. What may be the beginning of one is held back."""
    held = ""
    for piece in pieces:
        held += piece
        kept = cut(held, stops)
        if len(kept) < len(held):
            yield from filter(None, [kept])
            return
        open_ = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        yield from filter(None, [held[: len(held) - open_]])
        held = held[len(held) - open_ :]
    yield from filter(None, [held])


class StopStrings:
    """Looks for stop strings in completions that grow by a token at a time."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._stops, self._decode = [stop for stop in stops if stop], decode
        self._longest = max(map(len, self._stops), default=0)

    def shortened(self, tokens: list[int]) -> list[int] | None:
        """None while there is no stop string. Otherwise the fewest tokens that have all text before the first one; if
        it begins inside a token, their text must still be `cut`."""
        if not self._stops or cut(tail := self._tail(tokens), self._stops) == tail:
            return None
        text = self._decode(tokens)
        before = cut(text, self._stops)
        if before == text:
            return None
        count = len(tokens)
        while count and self._decode(tokens[: count - 1]).startswith(before):
            count -= 1
        return tokens[:count]

    def _tail(self, tokens: list[int]) -> str:
        """The end of the text, with every stop string that the last token completes. Only some tokens are decoded: all
        of them in every step would take a time that grows with the square of the length."""
        last = len(self._decode(tokens[-1:]))
        count = self._longest + SLACK
        while True:
            text = self._decode(tokens[-count:])
            if count >= len(tokens) or len(text) - last >= self._longest + SLACK:
                return text
            count *= 2
