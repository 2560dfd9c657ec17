"""Sizes under zlib and xz."""

from __future__ import annotations

import lzma
import random
import zlib

from ropewalk.evaluate.tasks.likelihood import compressed_bits


def test_sizes_are_those_of_the_joined_documents():
    documents = [b"one fish, two fish, " * 20, b"red fish, blue fish, " * 20]
    sizes = compressed_bits(documents)
    assert sizes["zlib"] == 8 * len(zlib.compress(b"".join(documents), 9))
    assert sizes["xz"] == 8 * len(lzma.compress(b"".join(documents), preset=9 | lzma.PRESET_EXTREME))


def test_noise_does_not_shrink_and_repetition_does():
    noise = random.Random(0).randbytes(10_000)
    assert compressed_bits([noise])["zlib"] >= 80_000
    assert compressed_bits([noise, noise])["xz"] < 1.1 * compressed_bits([noise])["xz"]
