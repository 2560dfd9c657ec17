"""Which documents are measured."""

from __future__ import annotations

from collections import Counter

from ropewalk.evaluate.held_out import held_out_documents
from ropewalk.evaluate.text import Detokenizer
from ropewalk.store.manifest import read_manifest

from .tiny import CODE, PROSE


def chosen(corpus, *, max_bytes: int, seed: int = 0):
    manifest = read_manifest(corpus)
    detokenizer = Detokenizer(corpus, manifest.tokenizer)
    return held_out_documents(corpus, manifest, detokenizer, max_bytes=max_bytes, seed=seed)


def test_everything_is_taken_when_it_fits(corpus):
    documents = chosen(corpus, max_bytes=10**6)
    assert Counter(d.data for d in documents) == Counter(text.encode() for text in CODE + PROSE)
    assert {d.domain for d in documents if d.source == "py"} == {"code"}
    assert all(d.tokens[-1] == 0 and 0 not in d.tokens[:-1] for d in documents)


def test_the_budget_is_shared_by_bytes(corpus):
    total = sum(len(text.encode()) for text in CODE + PROSE)
    documents = chosen(corpus, max_bytes=total // 2)
    assert sum(len(d.data) for d in documents) <= total // 2
    assert Counter(d.source for d in documents) == {"py": 4, "book": 4}


def test_the_choice_is_a_function_of_the_seed(corpus):
    first, again, other = ([d.data for d in chosen(corpus, max_bytes=2000, seed=seed)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_budget_below_every_document_takes_the_shortest(corpus):
    (document,) = chosen(corpus, max_bytes=50)
    assert len(document.data) == min(len(text.encode()) for text in CODE + PROSE)
