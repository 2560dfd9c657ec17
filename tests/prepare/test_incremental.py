"""A new crawl against an index of earlier ones: copies are known by the ids of what was there before."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ropewalk.prepare.config import Deduplicate, Filter, Near, Prepare, Source, Tokenizer
from ropewalk.prepare.pipeline import plan_inputs, prepare
from tests.prepare.every_stage import prose


def crawl(name: str) -> Prepare:
    return Prepare(
        sources=(Source(name=name, paths=(name,)),),
        filter=Filter(min_characters=50),
        deduplicate=Deduplicate(near=Near(threshold=0.6, index="index", max_removed_share=1.0)),
        tokenizer=Tokenizer(vocab_size=300, train_bytes=5000),
        validation_share=0.2,
        workers=1,
        folder="prepared",
    )


@pytest.fixture(autouse=True)
def crawls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three crawls of twelve pages; each brings three pages of the one before, slightly changed."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(3)
    before: list[str] = []
    for name in ("first", "second", "third"):
        pages = [page.replace("rope", "cord", 1) for page in before[:3]]
        pages += [prose(draw, 20) for _ in range(12 - len(pages))]
        Path(name).mkdir()
        for number, page in enumerate(pages):
            Path(name, f"{number:02}.txt").write_text(page, "utf-8")
        before = pages[3:]


def partners(folder: Path) -> dict[str, str]:
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    return {row["id"]: row["partner"] for row in rows if row["stage"] == "near"}


def expected(name: str, before: str) -> dict[str, str]:
    return {f"{name}:{name}/{n:02}.txt": f"{before}:{before}/{n + (3 if before else 0):02}.txt" for n in range(3)}


def test_a_copy_names_the_document_of_the_earlier_crawl(tree) -> None:
    assert partners(prepare(crawl("first"), seed=1).folder) == {}
    second = prepare(crawl("second"), seed=1)
    assert partners(second.folder) == expected("second", "first")
    third = prepare(crawl("third"), seed=1)
    assert partners(third.folder) == expected("third", "second")
    # What a crawl was compared with is what was there before it, whenever it is prepared again.
    bytes_before = tree(second.folder)
    shutil.rmtree(second.folder)
    assert tree(prepare(crawl("second"), seed=1).folder) == bytes_before


def test_the_hash_follows_what_the_index_held_before() -> None:
    alone = plan_inputs(crawl("second"), seed=1).hash
    prepare(crawl("first"), seed=1)
    assert plan_inputs(crawl("second"), seed=1).hash != alone
    known = plan_inputs(crawl("second"), seed=1).hash
    prepare(crawl("second"), seed=1)
    prepare(crawl("third"), seed=1)
    assert plan_inputs(crawl("second"), seed=1).hash == known


def test_a_crawl_that_was_added_and_not_finished_is_not_compared_with_itself(tree, monkeypatch) -> None:
    prepare(crawl("first"), seed=1)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ropewalk.prepare.build.write_manifest", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(crawl("second"), seed=1)
    assert partners(prepare(crawl("second"), seed=1).folder) == expected("second", "first")


def test_without_an_index_nothing_is_remembered() -> None:
    forgetful = dataclasses.replace(crawl("second"), deduplicate=Deduplicate(near=Near(threshold=0.6)))
    prepare(crawl("first"), seed=1)
    assert partners(prepare(forgetful, seed=1).folder) == {}
