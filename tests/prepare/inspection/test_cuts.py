"""How files of text are proposed to be cut, and how their writing is told."""

from __future__ import annotations

import pytest
from made_files import CHINESE, PROSE, SENTENCE, play

from ropewalk.prepare.inspection.content import content_of
from ropewalk.prepare.inspection.scripts import writing_of
from ropewalk.prepare.inspection.splits import best_cut

WRAPPED = "\n".join(SENTENCE.strip()[:70] for _ in range(6))


@pytest.mark.parametrize(
    ("text", "split", "separator", "documents"),
    [
        ("<|endoftext|>".join([PROSE] * 9), "separator", "<|endoftext|>", 9),
        ("\n***\n".join([PROSE] * 9), "separator", "***", 9),
        ("".join(f"# Part {n}\n\n{PROSE}\n\n" for n in range(9)), "headings", "", 9),
        (play(60), "blank-lines", "", 60),
        ("\n\n".join([PROSE] * 60), "size", "", None),
        ("\n\n".join([WRAPPED] * 60), "size", "", None),
        (CHINESE * 3000, "size", "", None),
    ],
    ids=["tokens", "rules", "headings", "speeches", "paragraphs", "wrapped", "chinese"],
)
def test_a_text_is_cut_where_its_documents_end(text: str, split: str, separator: str, documents: int | None) -> None:
    cut = best_cut([text])
    assert (cut.split, cut.separator) == (split, separator)
    assert cut.documents == (documents or cut.documents)
    assert cut.split != "size" or 2000 < cut.median_characters <= 4000


def test_code_is_not_cut_at_empty_lines() -> None:
    code = "\n".join("def twist(yarn):\n    turns = 3\n    return yarn * turns\n" for _ in range(60))
    assert best_cut([code], prose=False).split == "size"


@pytest.mark.parametrize(
    ("text", "script", "language"),
    [
        (PROSE, "Latin", "en"),
        (CHINESE * 9, "Chinese", "zh"),
        (
            "Веревку вьют из волокон конопли в длинном здании, где прядильщики ходят взад и вперёд. " * 5,
            "Cyrillic",
            "ru",
        ),
        ("縄をなう人は、長い小屋の中を歩きながら、麻の繊維をよって糸を作ります。" * 5, "Japanese", "ja"),
        ("밧줄을 만드는 사람은 긴 건물 안을 걸으며 삼 섬유를 꼬아 실을 만듭니다. " * 5, "Korean", "ko"),
    ],
)
def test_scripts_and_languages_are_told(text: str, script: str, language: str) -> None:
    writing = writing_of([text])
    assert next(iter(writing.scripts)) == script
    assert next(iter(writing.languages)) == language
    assert writing.bytes_per_token(8192) > writing.bytes_per_token(1024) > 1


def test_a_mixture_has_the_bytes_a_token_between_those_of_its_parts() -> None:
    english, chinese, both = (writing_of([text], languages=False) for text in (PROSE, CHINESE, PROSE + CHINESE))
    assert chinese.bytes_per_token(4096) < both.bytes_per_token(4096) < english.bytes_per_token(4096)


@pytest.mark.parametrize(
    ("data", "content"),
    [
        (b"", "empty"),
        (b"a rope", "text"),
        (b'{"a": 1}\n{"a": 2}\n', "json lines"),
        (b'{"a": 1}', "json lines"),
        (b'{\n  "a": 1,\n  "b": 2\n}\n', "json object"),
        (b'[{"a": 1}, {"a": 2}]', "json list"),
        (b"[draft] a rope", "text"),
        (b"{{ template }}\nmore\n", "text"),
        (b"<!DOCTYPE html><html>", "html"),
        (b"<?xml version='1.0'?><article/>", "xml"),
        (b"% a paper\n\\documentclass{article}", "latex"),
        (b"WARC/1.0\r\n", "warc"),
        (b"PAR1...", "parquet"),
        (b"%PDF-1.7", "pdf"),
        ("ü".encode("latin-1") + b" plain", "not utf-8"),
        (bytes(range(1, 256)), "binary"),
        (b"a\0b", "binary"),
        ("a".encode("utf-16"), "utf-16"),
        ("绳".encode()[:2], "not utf-8"),
    ],
)
def test_content_is_told_by_its_first_bytes(data: bytes, content: str) -> None:
    assert content_of(data, whole=True) == content


def test_a_character_that_is_cut_off_is_no_fault() -> None:
    assert content_of("绳".encode() * 9 + b"\xe7", whole=False) == "text"
