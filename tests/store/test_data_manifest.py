"""The manifest is read back as written, and counts that do not add up are refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import DataError
from ropewalk.base.seal import sealed_json
from ropewalk.store.manifest import (
    Manifest,
    ShardEntry,
    SourceEntry,
    StepCount,
    TokenizerEntry,
    check_counts,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from tests.checkpoint.hostile import VALUES, _places


def step(name: str, documents_in: int, documents_out: int, **removed: int) -> StepCount:
    return StepCount(
        step=name,
        documents_in=documents_in,
        documents_out=documents_out,
        bytes_in=10 * documents_in,
        bytes_out=10 * documents_out,
        removed=removed,
        edited={"normalise": 1},
    )


def source(*steps: StepCount) -> SourceEntry:
    return SourceEntry(name="wörter", domain="prose", weight=0.5, steps=steps)


def shard(split: str, name: str, tokens: int) -> ShardEntry:
    return ShardEntry(
        file=f"{name}-{split}-00000.tokens",
        source=name,
        split=split,  # type: ignore[arg-type]
        documents=2,
        tokens=tokens,
        text_bytes=40,
        file_bytes=300,
        checksum="0123456789abcdef",
    )


MANIFEST = Manifest(
    recipe_hash="abc",
    dtype="uint16",
    tokenizer=TokenizerEntry(file="tokenizer.json", checksum="12", vocabulary=300, end_of_text=0),
    sources=(
        source(step("read", 9, 9), step("filter", 9, 6, min_characters=2, max_characters=1), step("split", 6, 6)),
    ),
    shards=(shard("train", "a", 5), shard("train", "b", 7), shard("validation", "a", 3)),
)


def test_a_manifest_is_read_back_as_written(tmp_path: Path) -> None:
    assert write_manifest(tmp_path, MANIFEST) == tmp_path / "manifest.json"
    assert read_manifest(tmp_path) == MANIFEST


def test_a_manifest_of_format_1_has_plain_token_shards(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, MANIFEST)
    tree = json.loads(path.read_text()) | {"format": 1}
    del tree["seal"], tree["tables"]
    for shard in tree["shards"]:
        del shard["kind"], shard["compression"]
    path.write_text(json.dumps(tree))
    assert read_manifest(tmp_path) == MANIFEST


def test_shards_are_chosen_by_split_and_source() -> None:
    assert [MANIFEST.tokens("train"), MANIFEST.tokens("validation")] == [12, 3]
    assert [entry.source for entry in MANIFEST.shards_of("train")] == ["a", "b"]
    assert [entry.tokens for entry in MANIFEST.shards_of("train", "b")] == [7]
    assert MANIFEST.shards_of("validation", "b") == []


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([step("filter", 9, 6, min_characters=2)], "step filter: 9 documents in, but 6 out and 2 removed"),
        ([step("read", 9, 9), step("filter", 8, 8)], "9 documents left read, 8 reached filter"),
    ],
)
def test_counts_that_do_not_add_up_are_refused_before_anything_is_written(
    tmp_path: Path, steps: list[StepCount], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        check_counts(source(*steps))
    with pytest.raises(DataError, match="source wörter"):
        write_manifest(tmp_path, dataclasses.replace(MANIFEST, sources=(source(*steps),)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [v for v in VALUES if v != "x"], ids=lambda v: ascii(v)[:20])
def test_a_sound_seal_is_no_reason_to_believe_what_it_covers(tmp_path: Path, value: Any) -> None:
    path = write_manifest(tmp_path, MANIFEST)
    whole = json.loads(path.read_text())
    del whole["seal"]
    for *above, key in list(_places(whole)):
        tree = copy.deepcopy(whole)
        parent: Any = tree
        for part in above:
            parent = parent[part]
        parent[key] = value
        try:
            data = sealed_json(tree)
        except ValueError:  # no JSON: NaN, half of a surrogate pair
            continue
        with contextlib.suppress(DataError):
            assert isinstance(parse_manifest(data, path=path), Manifest)
        if (type(value) is bool or value in ([[]], [-1])) and key not in ("format", "warnings", "encoders"):
            with pytest.raises(DataError, match=r"manifest\.json"):
                parse_manifest(data, path=path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, MANIFEST)
    tree = json.loads(path.read_text()) | {"format": 4}
    del tree["seal"]
    path.write_bytes(sealed_json(tree))
    with pytest.raises(DataError, match=r"manifest\.json: this manifest has format 4.*upgrade ropewalk"):
        read_manifest(tmp_path)


DAMAGE = [(key, "absent") for key in ("recipe_hash", "dtype", "tokenizer", "sources", "shards")] + [
    (key, value) for key in ("tokenizer", "sources", "shards") for value in (3, [3], {"x": 3}, None)
]


@pytest.mark.parametrize(("key", "value"), DAMAGE)
def test_a_damaged_manifest_is_named(tmp_path: Path, key: str, value: object) -> None:
    path = write_manifest(tmp_path, MANIFEST)
    tree = json.loads(path.read_text()) | {key: value}
    if value == "absent":
        del tree[key]
    del tree["seal"]
    path.write_bytes(sealed_json(tree))
    with pytest.raises(DataError, match=r"manifest\.json: this manifest is damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json: (not a ropewalk manifest|this manifest is damaged)"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="no such manifest"):
        read_manifest(tmp_path / "nowhere")
