"""Everything the rules compare, measured in one pass and kept as columns: a threshold can change without the text.

All columns are counts; a share is one column over another (`rules`). What a word is says `kernels.words`.

A line is what stands between line ends; a blank one (white space alone) is none. A paragraph is a run of lines without
a blank one between. A sentence holds a word and ends with its line, or at a mark (. ! ? and those of other scripts)
with closing quotes and brackets that white space follows; after a full stop the next word must not begin in lower case.
Marks that are followed by no space in their script (。！？) need none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ropewalk.base.errors import UserError

from .columns import text_buffers
from .kernels.phrases import Phrases, make_phrases
from .kernels.statistics import COLUMNS, JAVASCRIPT, LOREM_IPSUM, POLICY, STOP_WORDS, count

MEANINGS = {
    "bytes": "length in UTF-8",
    "characters": "code points",
    "visible_characters": "characters that are not white space",
    "letters": "characters of Unicode category L",
    "line_ends": "new line characters",
    "line_characters": "characters without line ends",
    "all_lines": "lines, blank ones too; what follows the last line end counts unless it is empty",
    "lines": "lines that are not blank",
    "short_lines": "lines of at most 30 characters; a letter of a script without spaces counts three",
    "long_lines": "lines of at least 200 characters",
    "bullet_lines": "lines that begin with a bullet or a hyphen",
    "ellipsis_lines": "lines that end in ... or …",
    "terminal_lines": "lines that end in a sentence's mark (. ! ? and those of other scripts)",
    "lorem_ipsum_lines": "lines with `lorem ipsum`",
    "javascript_lines": "lines with the word `javascript`",
    "policy_lines": "lines that speak of cookies, terms of use or a privacy policy",
    "duplicate_lines": "lines equal to an earlier line",
    "duplicate_line_characters": "characters in these",
    "paragraphs": "runs of lines without a blank one between",
    "duplicate_paragraphs": "paragraphs equal to an earlier paragraph",
    "duplicate_paragraph_characters": "characters in these, the line ends inside included",
    "sentences": "sentences; a line holds whole ones",
    "words": "words",
    "pieces": "words, and stretches between white space without a word (symbols)",
    "unsegmented_words": "words of scripts without spaces between words: one a letter",
    "alphabetic_words": "words with a letter",
    "word_characters": "characters in words",
    "stop_words": "different stop words that occur",
    "hash_signs": "#",
    "ellipses": "... and …",
    "curly_brackets": "{",
    "top_2_gram_characters": "characters in all places of the most frequent two words in a row; of several, the first",
    "top_3_gram_characters": "the same of three words",
    "top_4_gram_characters": "the same of four words",
    "duplicate_5_gram_characters": "characters of words in five in a row that stood before; from the left, none twice",
    "duplicate_6_gram_characters": "the same of six",
    "duplicate_7_gram_characters": "the same of seven",
    "duplicate_8_gram_characters": "the same of eight",
    "duplicate_9_gram_characters": "the same of nine",
    "duplicate_10_gram_characters": "the same of ten",
}
"""What each column counts, in a document."""

ENGLISH = ("the", "be", "to", "of", "and", "that", "have", "with")
"""The stop words of Gopher."""
POLICY_PHRASES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
"""The phrases by which C4 knows lines about cookies and terms."""
_PHRASES = (
    ("lorem ipsum", int(LOREM_IPSUM)),
    ("javascript", int(JAVASCRIPT)),
    *((phrase, int(POLICY)) for phrase in POLICY_PHRASES),
)


def measure(text: pa.LargeStringArray, *, stop_words: Sequence[str] = ENGLISH) -> pa.RecordBatch:
    """One row a document with the columns of MEANINGS, all int64. 100 MB/s a core."""
    rows = count(*text_buffers(text), _phrases(tuple(stop_words)))
    columns = np.ascontiguousarray(rows.T)
    return pa.record_batch([pa.array(column) for column in columns], names=list(COLUMNS))


@functools.lru_cache(maxsize=8)
def _phrases(stop_words: tuple[str, ...]) -> Phrases:
    if len(stop_words) > STOP_WORDS:
        raise UserError(f"`stop_words` has {len(stop_words)} entries; {STOP_WORDS} can be told apart")
    return make_phrases([*((word, 1 << place) for place, word in enumerate(stop_words)), *_PHRASES])
