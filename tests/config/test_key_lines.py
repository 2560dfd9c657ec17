"""Where keys stand, against a brute force that never looks at a statement alone."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ropewalk.config.positions import key_lines

PATHS = dict[tuple[str | int, ...], int]


def brute_force(text: str) -> PATHS:
    """Parses every prefix of the text: a key stands where the statement begins that first makes it appear."""
    lines = text.split("\n")
    found: PATHS = {}
    begin = 1
    for count in range(1, len(lines) + 1):
        try:
            tree = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        for path in keys_in(tree):
            found.setdefault(path, begin)
        begin = count + 1
    assert begin == len(lines) + 1, "the text is not TOML"
    return found


def keys_in(tree: Any) -> list[tuple[str | int, ...]]:
    """Paths of all keys, and of the tables in lists."""
    if isinstance(tree, dict):
        pairs = list(tree.items())
    else:
        pairs = [(index, item) for index, item in enumerate(tree) if isinstance(item, dict)]
    deeper = [(key, *path) for key, child in pairs if isinstance(child, (dict, list)) for path in keys_in(child)]
    return [(key,) for key, _ in pairs] + deeper


SPELLINGS = ("k{}", '"k {}"', "'k.{}'", '"[k{}]"', '"k{} = 1"', '"#k{}"', '"ü\\u0041{}"', "{}")
VALUES = (
    "1",
    "true # not = a key",
    '"a # b"',
    "[1, [2, 3], {a = 1, b.c = [{d = 2}]}]",
    "{x = 1, y = {z = 'w'}}",
    "[\n  1, # one\n\n  # fake = 2\n  2,\n]",
    '[\n  {a = "]"},\n  {a = "x", b = [\n 3]},\n]',
    '"""\nfake = 1\n[fake]\n[[fake]]\n"""',
    "'''\n# no comment\n\"\"\"\nfake = 2'''",
    "[\"\"\"\n]\n\"\"\", '''\n[[x]]''']",
    '"a separator \u2028 of lines"',
    "1979-05-27T07:32:00Z",
)
FILLERS = ("", "   ", "# key = 1", "  # [table]", "# \u2028 = 1 \x85")


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Valid TOML: every key is new, but headers of arrays of tables come again, at any depth."""
    lines: list[str] = []
    tables: list[str] = []
    arrays: list[str] = []

    def fresh() -> str:
        return draw(st.sampled_from(SPELLINGS)).format(1000 + len(lines))

    def below_an_old_one() -> str:
        return draw(st.sampled_from(["", *(f"{name}." for name in tables + arrays)])) + fresh()

    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["key", "key", "dotted", "filler", "table", "array", "again"]))
        if kind in ("key", "dotted"):
            key = fresh() if kind == "key" else f"{fresh()} . 'x'.y"
            lines.append(draw(st.sampled_from(["", "  "])) + f"{key} = {draw(st.sampled_from(VALUES))}")
        elif kind == "filler":
            lines.append(draw(st.sampled_from(FILLERS)))
        elif kind == "table":
            tables.append(below_an_old_one())
            lines.append(f" [ {tables[-1]} ] # table")
        else:
            if kind == "array" or not arrays:
                arrays.append(below_an_old_one())
            lines.append(f"[[{draw(st.sampled_from(arrays)) if kind == 'again' else arrays[-1]}]]")
    text = "\n".join(lines)
    assume(_is_toml(text))  # an array may come again below a table that a header made meanwhile
    return text


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(documents())
def test_every_key_is_found_on_the_line_where_its_statement_begins(text: str) -> None:
    assert key_lines(text) == brute_force(text)


@settings(max_examples=50, deadline=None)
@given(documents())
def test_line_ends_of_windows_change_nothing(text: str) -> None:
    assert key_lines(text.replace("\n", "\r\n")) == key_lines(text)


def test_a_long_list_does_not_slow_reading_down() -> None:
    text = "a = [\n" + '  "a/path",\n' * 20_000 + "]\nb = 1\n"
    assert key_lines(text) == {("a",): 1, ("b",): 20_003}
