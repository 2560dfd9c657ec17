"""Lists of addresses and words: against plain string operations, and with files that are wrong."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.prepare.config import Filter, Urls, WordList
from ropewalk.prepare.lists import list_files, match, read_lists
from ropewalk.prepare.rules import judge
from tests.prepare.slow_statistics import words_of

DOMAINS = ("bad.com", "WWW.Evil.org", "co.uk")
HARD = ("casino", "坏")
SOFT = ("poker", "bet", "Win")
PARTS = ("xxx", "free money", "ab1")
PHRASES = ("bad word", "evil", "坏话", "a b c", "b c")


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Filter:
    folder = tmp_path_factory.mktemp("lists")

    def file(name: str, entries: tuple[str, ...]) -> tuple[str, ...]:
        (folder / name).write_text("# a remark\n\n" + "\n".join(entries) + "\n", encoding="utf-8")
        return (str(folder / name),)

    urls = Urls(
        domains=file("domains", DOMAINS),
        words=file("words", HARD),
        soft_words=file("soft", SOFT),
        parts=file("parts", PARTS),
    )
    return Filter(urls=urls, words=WordList(files=file("phrases", PHRASES)))


def row(chosen: Filter, *, text: str = "", url: str = "") -> dict[str, int]:
    strings = (pa.array([value], pa.large_string()) for value in (text, url))
    found = match(read_lists(chosen), **dict(zip(("text", "urls"), strings, strict=True)))
    return found.to_pylist()[0]


hosts = st.lists(
    st.sampled_from(("www", "bad", "com", "evil", "EVIL", "org", "co", "uk", "casino")), min_size=1, max_size=4
)
tails = st.lists(
    st.sampled_from(("/", "?", "#", "-", "poker", "bet", "win", "WIN", "xx", "x", "free", "money", "坏")), max_size=8
)


@settings(max_examples=200, deadline=None)
@given(host=hosts, tail=tails, user=st.sampled_from(("", "me@", "me:secret@")), port=st.sampled_from(("", ":80")))
def test_addresses_are_matched_as_their_parts_say(chosen, host, tail, user, port) -> None:
    url = f"http://{user}{'.'.join(host)}{port}/{''.join(tail)}"
    name = (urlsplit(url).hostname or "").split(".")
    above = {".".join(name[place:]) for place in range(len(name))}
    words = set(words_of(url))
    letters = re.sub("[^a-z0-9]", "", url.lower())
    squeezed = [re.sub("[^a-z0-9]", "", part) for part in PARTS]
    places = sum(letters.startswith(part, place) for part in squeezed for place in range(len(letters)))
    assert row(chosen, url=url) == {
        "url_domains": len(above & {domain.lower() for domain in DOMAINS}),
        "url_words": len(words & set(HARD)),
        "url_soft_words": len(words & {word.lower() for word in SOFT}),
        "url_parts": places,
        "listed_phrases": 0,
        "listed_words": 0,
    }


@pytest.mark.parametrize(
    ("text", "phrases", "words"),
    [
        ("A Bad-Word here, badword there", 1, 2),
        ("evil evil EVIL", 3, 3),
        ("他说坏话。坏 话", 2, 4),
        ("a b c", 1, 3),
        ("x b c", 1, 2),
        ("medieval", 0, 0),
        ("", 0, 0),
    ],
)
def test_phrases_are_found_as_whole_words_and_anywhere_in_chinese(chosen, text, phrases, words) -> None:
    found = row(chosen, text=text)
    assert (found["listed_phrases"], found["listed_words"]) == (phrases, words)


def test_rules_name_the_list_that_an_address_is_on(chosen) -> None:
    addresses = [
        "http://a.bad.com",
        "http://a.com/casino",
        "http://a.com/poker/bet",
        "http://a.com/xxx",
        "http://a.com/bet",
        "",
    ]
    blank = pa.array([""] * len(addresses), pa.large_string())
    found = match(read_lists(chosen), text=blank, urls=pa.array(addresses, pa.large_string()))
    names = (
        "characters",
        "line_characters",
        "all_lines",
        "letters",
        "visible_characters",
        "duplicate_lines",
        "lines",
        "words",
    )
    measured = pa.record_batch(
        [*found.columns, *[pa.array([500] * len(addresses))] * len(names)], [*found.schema.names, *names]
    )
    broken = judge(measured, Filter(max_duplicate_line_share=1.0, urls=chosen.urls)).removals()["rule"].to_pylist()
    assert broken == ["urls.domains", "urls.words", "urls.max_soft_words", "urls.parts", None, None]


def test_without_lists_nothing_is_found() -> None:
    assert set(row(Filter(), text="evil", url="http://bad.com").values()) == {0}
    assert list_files(Filter()) == ()


def test_the_files_of_all_lists_are_known(chosen) -> None:
    assert [Path(name).name for name in list_files(chosen)] == ["domains", "words", "soft", "parts", "phrases"]


@pytest.mark.parametrize(
    ("content", "setting", "problem"),
    [
        (None, "words", "list: No such file or directory; write the list or correct the name"),
        (b"\xff\xfe", "words", "list: not UTF-8 text"),
        (
            b"good\n1 2 3 4 5 6 7 8 9\n",
            "words",
            "list:2: '1 2 3 4 5 6 7 8 9' has 9 words; `filter.words.files` takes one to 8",
        ),
        (b"...\n", "words", "list:1: '...' has 0 words"),
        (b"two words\n", "urls", "list:1: 'two words' has 2 words; `filter.urls.words` takes one word a line"),
        (b"--\n", "parts", "list:1: '--' has no letter or digit"),
    ],
)
def test_a_list_that_cannot_be_meant_is_named_with_its_line(tmp_path, content, setting, problem) -> None:
    path = tmp_path / "list"
    if content is not None:
        path.write_bytes(content)
    chosen = {
        "words": Filter(words=WordList(files=(str(path),))),
        "urls": Filter(urls=Urls(words=(str(path),))),
        "parts": Filter(urls=Urls(parts=(str(path),))),
    }
    with pytest.raises(DataError) as caught:
        read_lists(chosen[setting])
    assert problem in str(caught.value)
