"""Tokens back to bytes, exactly or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from ropewalk.base.errors import DataError
from ropewalk.evaluate.held_out import held_out_documents
from ropewalk.evaluate.text import Detokenizer
from ropewalk.store.manifest import read_manifest

from .tiny import CODE, END, PROSE, train_tokenizer, write_corpus


@pytest.fixture(scope="module")
def tokenizer(corpus) -> Tokenizer:
    return Tokenizer.from_file(str(corpus / "tokenizer.json"))


@pytest.fixture(scope="module")
def detokenizer(corpus) -> Detokenizer:
    return Detokenizer(corpus, read_manifest(corpus).tokenizer)


@given(text=st.text() | st.sampled_from(CODE + PROSE + [f"a {END} b"]))
def test_encode_then_decode_is_identity(tokenizer, detokenizer, text):
    assert detokenizer.data(tokenizer.encode(text).ids) == text.encode()


def test_half_a_character_keeps_its_bytes(tokenizer, detokenizer):
    ids = tokenizer.encode("🪢").ids
    assert b"".join(detokenizer.data([token]) for token in ids) == "🪢".encode()
    assert detokenizer.text(ids[:1]) == "\ufffd"


@pytest.mark.parametrize("kind", ["prefix_space", "normaliser"])
def test_a_tokenizer_that_changes_text_is_refused(tmp_path, kind):
    texts = ["ﬁbre and ﬂax\n" * 3, "one two\n"]
    tokenizer = train_tokenizer(texts, prefix_space=kind == "prefix_space")
    if kind == "normaliser":
        tokenizer.normalizer = normalizers.NFKC()
    manifest = write_corpus(tmp_path, {"book": ("prose", texts)}, tokenizer)
    detokenizer = Detokenizer(tmp_path, manifest.tokenizer)
    with pytest.raises(DataError, match="does not give text back exactly"):
        held_out_documents(tmp_path, manifest, detokenizer, max_bytes=10_000, seed=0)


def test_a_tokenizer_of_another_kind_is_decoded_as_a_whole(tmp_path):
    from tokenizers import decoders, models, pre_tokenizers

    letters = {letter: number for number, letter in enumerate(sorted({END, "▁", *"abcde\n", "é"}))}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    manifest = write_corpus(tmp_path, {"book": ("prose", ["a bé d\n", "ca b"])}, tokenizer)
    detokenizer = Detokenizer(tmp_path, manifest.tokenizer)
    found = held_out_documents(tmp_path, manifest, detokenizer, max_bytes=10_000, seed=0)
    assert sorted(document.data for document in found) == ["a bé d\n".encode(), b"ca b"]


def test_a_damaged_tokenizer_is_named(tmp_path, tokenizer):
    manifest = write_corpus(tmp_path, {"book": ("prose", PROSE)}, tokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: damaged tokenizer"):
        Detokenizer(tmp_path, manifest.tokenizer)
