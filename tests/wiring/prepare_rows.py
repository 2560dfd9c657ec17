"""`[prepare]`: sources, rules, duplicates, tokens."""

from __future__ import annotations

from tests.wiring.rows import Given, Row, prepared

GOPHER: Given = ("prepare.filter.gopher={}",)
REPETITION: Given = ("prepare.filter.repetition={}",)
C4: Given = ("prepare.filter.c4={}",)
FINEWEB: Given = ("prepare.filter.fineweb={}",)
REFINED: Given = ("prepare.filter.refinedweb={}",)
GERMAN: Given = ('prepare.filter.language.keep=["en"]',)
SOFT: Given = ('prepare.filter.urls.soft_words=["soft.txt"]',)
LIST: Given = ('prepare.filter.words={files=["words.txt"], max_words=1000}',)
SHARES: Given = ('prepare.filter.words={files=["words.txt"], max_words=1000, max_share=0.06}',)
BLOOM: Given = ('prepare.deduplicate.documents="bloom"', "prepare.deduplicate.bloom.expected_items=1000")
MINHASH: Given = ('prepare.deduplicate.near.kind="minhash"',)
SIMHASH: Given = (
    'prepare.deduplicate.near.kind="simhash"',
    "prepare.deduplicate.near.max_distance=60",  # a quarter of 256 bits at most
)
PIECES: Given = ("prepare.deduplicate.paragraphs=true",)
SPANS: Given = ('prepare.deduplicate.substring.action="remove"', "prepare.deduplicate.substring.length=60")
BOOK: Given = ('prepare.sources=[{name="notes", paths=["book.txt"], split="blank-lines"}]',)
SIZED: Given = ('prepare.sources=[{name="notes", paths=["book.txt"], split="size", split_characters=400}]',)
MARKED: Given = ('prepare.sources=[{name="notes", paths=["book.txt"], split="separator", separator="---"}]',)
TALK: Given = ('prepare.sources=[{name="notes", paths=["chat.jsonl"], format="chat"}]',)
SOURCES: Given = ('prepare.sources=[{name="notes", paths=["notes.jsonl"], weight=1}]',)
BARE: Given = ('prepare.sources=[{name="notes", paths=["bare.jsonl"]}]',)
PAPERS: Given = ('prepare.sources=[{name="notes", paths=["page.html", "notes.jsonl"]}]',)
NESTED: Given = ('prepare.sources=[{name="notes", paths=["nested.zip", "notes.jsonl"]}]',)
NGRAMS: Given = ('prepare.ngrams.unit="words"',)

EDITS = (
    *("c4.javascript", "c4.policy", "c4.citations"),
    *(f"refinedweb.{name}" for name in ("numbers", "counters", "single_words", "starts", "ends", "anywhere")),
)
"""Rules that cut lines or phrases out of documents."""
FILTERS: list[tuple[str, str, Given]] = [
    # What must differ is which documents are removed, and by which rule, or for EDITS what is cut out of them.
    ("min_characters", "400", ()),
    ("max_characters", "500", ()),
    ("max_mean_line_length", "60", ()),
    ("min_letter_share", "0.9", ()),
    ("max_duplicate_line_share", "0.1", ()),
    ("gopher.min_words", "75", GOPHER),
    ("gopher.max_words", "75", GOPHER),
    ("gopher.min_mean_word_length", "4", GOPHER),
    ("gopher.max_mean_word_length", "4.2", GOPHER),
    ("gopher.max_hash_ratio", "0.01", GOPHER),
    ("gopher.max_ellipsis_ratio", "0.01", GOPHER),
    ("gopher.max_bullet_line_share", "0.1", GOPHER),
    ("gopher.max_ellipsis_line_share", "0.1", GOPHER),
    ("gopher.min_alphabetic_share", "0.99", GOPHER),
    ("gopher.min_stop_words", "8", GOPHER),
    ("gopher.stop_words", '["zebra", "rope", "winter"]', GOPHER),
    ("repetition.max_duplicate_line_share", "0.01", REPETITION),
    ("repetition.max_duplicate_paragraph_share", "0.01", REPETITION),
    ("repetition.max_duplicate_line_character_share", "0.01", REPETITION),
    ("repetition.max_duplicate_paragraph_character_share", "0.01", REPETITION),
    ("repetition.max_top_2_gram_share", "0.03", REPETITION),
    ("repetition.max_top_3_gram_share", "0.03", REPETITION),
    ("repetition.max_top_4_gram_share", "0.03", REPETITION),
    *((f"repetition.max_duplicate_{n}_gram_share", "0.01", REPETITION) for n in range(5, 11)),
    ("c4.unit", "paragraph", C4),
    ("c4.terminal_punctuation", "false", C4),
    ("c4.min_line_words", "12", C4),
    ("c4.max_word_length", "6", C4),
    ("c4.javascript", "false", C4),
    ("c4.policy", "false", C4),
    ("c4.citations", "false", C4),
    ("c4.lorem_ipsum", "false", C4),
    ("c4.curly_brackets", "false", C4),
    ("c4.min_sentences", "9", C4),
    ("c4.min_long_lines", "1", C4),
    ("fineweb.min_terminal_line_share", "0.95", FINEWEB),
    ("fineweb.max_short_line_share", "0.1", FINEWEB),
    ("fineweb.max_duplicate_character_share", "0.5", FINEWEB),
    ("fineweb.max_line_ends_per_word", "0.07", FINEWEB),
    ("refinedweb.max_uppercase_share", "1", REFINED),
    ("refinedweb.numbers", "false", REFINED),
    ("refinedweb.counters", "[]", REFINED),
    ("refinedweb.single_words", "false", REFINED),
    ("refinedweb.pattern_words", "3", REFINED),
    ("refinedweb.starts", "[]", REFINED),
    ("refinedweb.ends", "[]", REFINED),
    ("refinedweb.anywhere", "[]", REFINED),
    ("refinedweb.max_flagged_word_share", "0.2", REFINED),
    ("language.keep", '["en"]', ("prepare.filter.language={}",)),
    ("language.min_confidence", "0.99", GERMAN),
    ("urls.domains", '["hosts.txt"]', ()),
    ("urls.words", '["urls.txt"]', ()),
    ("urls.soft_words", '["soft.txt"]', ()),
    ("urls.max_soft_words", "2", SOFT),
    ("urls.parts", '["urls.txt"]', ()),
    ("words.files", '["soft.txt"]', ('prepare.filter.words={files=["words.txt"], max_words=2}',)),
    ("words.max_words", "2", LIST),
    ("words.max_share", "0.02", SHARES),
]

_ROWS = [
    ("sources.0.name", "letters", "documents", ()),
    ("sources.0.paths", '["bare.jsonl"]', "documents", ()),
    ("sources.0.format", "text", "documents", ()),
    ("sources.0.split", "headings", "documents", BOOK),
    ("sources.0.separator", "# Chapter", "kept bytes", MARKED),
    ("sources.0.split_characters", "200", "documents", SIZED),
    ("sources.0.text_key", "body", "shards", ()),
    ("sources.0.url_key", "link", "columns", ()),
    ("sources.0.time_key", "seen", "columns", ()),
    ("sources.0.license_key", "terms", "columns", ()),
    ("sources.0.domain", "poems", "columns", ()),
    ("sources.0.time", "1999", "columns", BARE),
    ("sources.0.license", "GPL", "columns", BARE),
    ("sources.0.weight", "5", "weights", SOURCES),
    ("sources.0.limits.document_bytes", "1000", "removed", ()),
    ("sources.0.limits.document_s", "7", "_time(seconds)", PAPERS),
    ("sources.0.limits.memory_bytes", "100000000", "_memory(count)", PAPERS),
    ("sources.0.limits.expansion", "2", "Budget(expansion)", NESTED),
    ("sources.0.limits.nesting", "1", "removed", NESTED),
    ("deduplicate.documents", "off", "removed", ()),
    ("deduplicate.paragraphs", "true", "edits", ()),
    ("deduplicate.lines", "true", "edits", ("prepare.deduplicate.min_piece_bytes=20",)),
    ("deduplicate.min_piece_bytes", "1000", "edits", PIECES),
    ("deduplicate.bloom.expected_items", "100000", "filter bytes", BLOOM),
    ("deduplicate.bloom.false_positive_rate", "0.1", "filter bytes", BLOOM),
    ("deduplicate.near.kind", "minhash", "removed", ()),
    ("deduplicate.near.threshold", "0.97", "removed", MINHASH),
    ("deduplicate.near.shingle_words", "30", "removed", MINHASH),
    ("deduplicate.near.bands", "40", "artifacts", MINHASH),
    ("deduplicate.near.rows", "3", "artifacts", MINHASH),
    ("deduplicate.near.max_distance", "0", "removed", SIMHASH),
    ("deduplicate.near.fingerprint_bits", "256", "artifacts", SIMHASH),
    ("deduplicate.near.tables", "60", "artifacts", SIMHASH),
    ("deduplicate.near.table_bits", "22", "artifacts", SIMHASH),
    ("deduplicate.near.max_compared", "1", "stars(most)", MINHASH),
    ("deduplicate.near.max_removed_share", "0.01", "removed", MINHASH),
    ("deduplicate.near.index", "index", "index", MINHASH),
    ("deduplicate.substring.action", "remove", "edits", ("prepare.deduplicate.substring.length=60",)),
    ("deduplicate.substring.unit", "words", "edits", SPANS),
    ("deduplicate.substring.length", "2000", "edits", SPANS),
    ("deduplicate.substring.min_remaining_bytes", "0", "removed", SPANS),
    ("tokenizer.file", "given.json", "tokenizer", ()),
    ("tokenizer.kind", "unigram", "tokenizer", ()),
    ("tokenizer.vocab_size", "290", "vocabulary", ()),
    ("tokenizer.train_bytes", "1000", "tokenizer", ()),
    ("chat.template", "plain", "chat", TALK),
    ("ngrams.unit", "words", "files", ()),
    ("ngrams.length", "4", "sizes", NGRAMS),
    ("validation_share", "0.5", "split", ()),
    ("shard_tokens", "1000", "shards", ()),
    ("compression", "zstd", "shards", ()),
    ("artifacts", "drop", "artifacts", ()),
]

ROWS = [
    *(
        Row(f"prepare.filter.{key}", value, "edits" if key in EDITS else "removed", given, by=prepared)
        for key, value, given in FILTERS
    ),
    *(Row(f"prepare.{key}", value, sees, given, by=prepared) for key, value, sees, given in _ROWS),
]
