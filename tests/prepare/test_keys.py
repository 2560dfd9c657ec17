"""Keys of documents are those of the xxhash library, for ids of every length."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.prepare.encode import document_keys
from ropewalk.store.shards import document_key


@settings(deadline=None)
@given(st.lists(st.text(min_size=0, max_size=150)))
def test_keys_are_those_of_the_library(ids: list[str]) -> None:
    assert document_keys(pa.array(ids, pa.string())).tolist() == [document_key(name) for name in ids]


def test_ids_of_every_length_have_the_keys_of_the_library() -> None:
    ids = [("source:folder/päth-0123456789." * 20)[:length] for length in range(300)]
    column = pa.array(["before", *ids, "after"], pa.string()).slice(1, len(ids))
    assert document_keys(column).tolist() == [document_key(name) for name in ids]
