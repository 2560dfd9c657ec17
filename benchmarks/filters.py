"""Gopher, C4 and FineWeb rules on one core: ours beside datatrove's filters, and who decides what.

    make bench NAME=filters                three corpora; about three minutes
    python benchmarks/filters.py --quick   fewer documents

Corpora: the standard library's sources; English books cut into documents and Chinese poems from ../shared/data when
they are there. Both sides take the same seeded documents from memory; seconds are CPU seconds, without imports and
compilation. Ours corrects lines, measures every statistic and asks every rule of every document. `datatrove` applies
its four filters (GopherRepetition, GopherQuality, C4Quality, FineWebQuality) to every document, which is the same work;
`datatrove-pipeline` stops at the first filter that removes it, as its pipelines do: its own words make the first one
remove nine of ten poems, and nothing more is known of them.

Decisions are compared three times:
- ours with the slow reference of tests/prepare: every statistic and every rule;
- ours with datatrove given our words and sentences: filter by filter. What differs is explained by a trial: the filter
  runs again without what is named (blank lines, say), on both sides, and must then agree;
- ours with datatrove as it is (spaCy's words, jieba's for Chinese), which shows what the definition of a word does.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import importlib.util
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
PACKAGES = ["datatrove==0.10.1", "spacy==3.8.18", "jieba==0.42.1", "regex"]
LANGUAGES = {"code": "eng", "prose": "eng", "chinese": "cmn"}
"""datatrove's names of the languages: of Chinese, `cmn` alone is cut into words."""
DOCUMENTS = {"code": 150, "prose": 200, "chinese": 1000}
"""Documents that datatrove gets."""
FILTERS = ("repetition", "gopher", "c4", "fineweb")
OFF = {
    "min_characters": 0,
    "max_characters": 0,
    "max_mean_line_length": 0.0,
    "min_letter_share": 0.0,
    "max_duplicate_line_share": 1.0,
}
SECONDS = 0.5
"""CPU time for which ours repeats the same documents at least."""

Decisions = dict[str, list[str]]


# What is compared -----------------------------------------------------------------------------------------------------


def code() -> Iterator[str]:
    """Sources of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text("utf-8", errors="ignore")
            if 0 < len(text) < 100_000:
                yield text


def prose() -> Iterator[str]:
    """Books cut at paragraphs into documents of about 4 kB."""
    for path in sorted(DATA.glob("classic-books-en/*.jsonl.gz")):
        for book in texts_of(path):
            document = ""
            for paragraph in book.replace("\r\n", "\n").split("\n\n"):
                document += paragraph + "\n\n"
                if len(document) > 4000:
                    yield document.strip("\n")
                    document = ""


def chinese() -> Iterator[str]:
    """Poems, and some pieces of prose."""
    for path in sorted(DATA.glob("chinese-poetry/*.jsonl.gz")):
        yield from texts_of(path)


def texts_of(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


CORPORA: dict[str, Callable[[], Iterator[str]]] = {"code": code, "prose": prose, "chinese": chinese}


# Explanations: what is taken away on both sides for the trial ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trial:
    """A difference between the two definitions, and how to do without it."""

    what: str
    text: Callable[[str], str] = lambda text: text
    ours: dict[str, dict[str, object]] = dataclasses.field(default_factory=dict)
    theirs: dict[str, dict[str, object]] = dataclasses.field(default_factory=dict)


def without_blank_lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


TRIALS = (
    Trial(
        "lines are compared and ended with the white space around them",
        text=lambda text: "\n".join(line.strip() for line in text.split("\n")),
    ),
    Trial("blank lines, and what a last line end leaves, count as lines", text=without_blank_lines),
    Trial(
        "C4 takes what stands between white space for words of a line",
        ours={"c4": {"min_line_words": 0}},
        theirs={"c4": {"min_words_per_line": -1}},
    ),
    Trial(
        "C4 asks for Western marks at a line's end, and splits it into words at spaces",
        ours={"c4": {"terminal_punctuation": False, "min_line_words": 0}},
        theirs={"c4": {"filter_no_terminal_punct": False, "min_words_per_line": -1}},
    ),
    Trial(
        "letters of Chinese are words of length 1, and stop words are English",
        ours={"gopher": {"min_mean_word_length": 0.0, "min_stop_words": 0}},
        theirs={"gopher": {"min_avg_word_length": None, "min_stop_words": None}},
    ),
    Trial(
        "thirty letters of Chinese are a short line",
        ours={"fineweb": {"max_short_line_share": 1.0}},
        theirs={"fineweb": {"short_line_thr": 1.0}},
    ),
    Trial(
        "a space is counted between letters of Chinese",
        ours={"repetition": {f"max_top_{n}_gram_share": 1.0 for n in (2, 3, 4)}},
        theirs={"repetition": {"top_n_grams": []}},
    ),
)


# Ours -----------------------------------------------------------------------------------------------------------------


def settings(filters: tuple[str, ...] = FILTERS, changes: dict[str, dict[str, Any]] | None = None) -> Any:
    from ropewalk.prepare.config import C4, Filter, FineWeb, Gopher, Repetition

    tables = {"repetition": Repetition, "gopher": Gopher, "c4": C4, "fineweb": FineWeb}
    return Filter(**OFF, **{name: tables[name](**(changes or {}).get(name, {})) for name in filters})


def verdicts(documents: Any, chosen: Any) -> Any:
    """Corrections, statistics and rules, as a run of prepare has them."""
    from ropewalk.prepare.lines import correct
    from ropewalk.prepare.rules import judge
    from ropewalk.prepare.statistics import measure

    return judge(measure(correct(documents, chosen).text), chosen)


def our_decisions(texts: list[str], changes: dict[str, dict[str, Any]] | None = None) -> Decisions:
    """The first rule that each filter removes a document by, "" when it stays; every filter sees the text as it is."""
    import pyarrow as pa

    column = pa.array(texts, pa.large_string())
    found = {}
    for name in FILTERS:
        removals = verdicts(column, settings((name,), changes)).removals()
        found[name] = [rule or "" for rule in removals["rule"].to_pylist()]
    return found


def our_speed(texts: list[str]) -> dict[str, float]:
    """Documents a second of the whole, and megabytes a second of the statistics alone."""
    import pyarrow as pa

    from ropewalk.prepare.statistics import measure

    once = pa.array(texts, pa.large_string())
    size = sum(len(text.encode()) for text in texts)
    column = pa.concat_arrays([once] * max(1, 4_000_000 // size))
    copies = len(column) / len(once)
    whole = cpu_seconds(lambda: verdicts(column, settings()))
    alone = cpu_seconds(lambda: measure(column))
    return {"docs_per_s": len(column) / whole, "statistics_mb_per_s": copies * size / alone / 1e6}


def cpu_seconds(work: Callable[[], object]) -> float:
    work()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < SECONDS:
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def equal_to_reference(texts: list[str]) -> float:
    """Share of documents whose statistics and broken rules are those of the slow reference, corrections included."""
    import pyarrow as pa

    from ropewalk.prepare.lines import correct
    from ropewalk.prepare.rules import judge
    from ropewalk.prepare.statistics import measure

    sys.path.insert(0, str(ROOT))
    from tests.prepare import slow_rules, slow_statistics

    chosen = settings()
    corrected = correct(pa.array(texts, pa.large_string()), chosen)
    measured = measure(corrected.text)
    found = judge(measured, chosen)
    right = 0
    for place, text in enumerate(texts):
        plain, _ = slow_rules.corrected(text, chosen)
        broken = {rule.name for rule, gone in zip(found.rules, found.broken[:, place], strict=True) if gone}
        right += (
            corrected.text[place].as_py() == plain
            and measured.slice(place, 1).to_pylist() == [slow_statistics.measured(plain)]
            and broken == set(slow_rules.broken(plain, chosen))
        )
    return right / len(texts)


# datatrove, in its own environment ------------------------------------------------------------------------------------


def peer(job: dict[str, Any]) -> dict[str, Any]:
    """Decisions of datatrove's filters, each on the text as it is, and seconds when the job asks for them."""
    from datatrove.data import Document

    texts = job["texts"]
    filters = peer_filters(job)

    def decide(name: str, document: Any) -> str:
        try:
            result = filters[name].filter(document)
        except ZeroDivisionError:  # a text without words
            return "division by zero"
        return result[1] if isinstance(result, tuple) else "" if result else "removed"

    def pipeline(text: str) -> None:
        document = Document(text=text, id="0")
        any(decide(name, document) for name in FILTERS)

    def every() -> dict[str, list[str]]:
        return {name: [decide(name, Document(text=text, id="0")) for text in texts] for name in FILTERS}

    for name in FILTERS:
        decide(name, Document(text=texts[0], id="0"))  # loads spaCy
    start = time.process_time()
    decisions = every()
    found: dict[str, Any] = {"decisions": decisions, "seconds": time.process_time() - start}
    if job["pipeline"]:
        start = time.process_time()
        for text in texts:
            pipeline(text)
        found["pipeline_seconds"] = time.process_time() - start
    return found


def peer_filters(job: dict[str, Any]) -> dict[str, Any]:
    """datatrove's filters with its own words in a language, or with ours."""
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.utils.word_tokenizers import WordTokenizer

    path = ROOT / "tests" / "prepare" / "slow_statistics.py"
    spec = importlib.util.spec_from_file_location("slow_statistics", path)
    assert spec is not None
    assert spec.loader is not None
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)

    class Ours(WordTokenizer):
        """Our words; with symbols, also those that stand alone between white space."""

        def __init__(self, symbols: bool) -> None:
            super().__init__()
            self.symbols = symbols

        def word_tokenize(self, text: str) -> list[str]:
            if not self.symbols:
                return slow.words_of(text)
            return [word for stretch in text.split() for word in slow.words_of(stretch) or [stretch]]

        def sent_tokenize(self, text: str) -> list[str]:
            return [text] * slow.sentences_of(text)

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, 0)] * slow.sentences_of(text)

    words, pieces = (job["language"],) * 2 if job["language"] else (Ours(False), Ours(True))
    changes = job["changes"]
    return {
        "repetition": GopherRepetitionFilter(language=words, **changes.get("repetition", {})),
        "gopher": GopherQualityFilter(language=pieces, **changes.get("gopher", {})),
        "c4": C4QualityFilter(language=pieces, **changes.get("c4", {})),
        "fineweb": FineWebQualityFilter(language=pieces, **changes.get("fineweb", {})),
    }


def ask(python: Path, texts: list[str], *, language: str, pipeline: bool = False, changes: Any = None) -> Any:
    from harness import call

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        job = {"texts": texts, "language": language, "pipeline": pipeline, "changes": changes or {}}
        json.dump(job, file)
        file.flush()
        return call(python, __file__, "--peer", file.name)


# The comparison -------------------------------------------------------------------------------------------------------


def agreement(ours: Decisions, theirs: Decisions) -> dict[str, float]:
    """Share of documents that both sides keep or both remove, by filter."""
    return {
        name: statistics.mean((a == "") == (b == "") for a, b in zip(ours[name], theirs[name], strict=True))
        for name in FILTERS
    }


def explained(python: Path, texts: list[str], ours: Decisions, theirs: Decisions) -> dict[str, int]:
    """How many decisions differ for which reason; what no trial explains is counted under its rules."""
    differing = {
        (name, place)
        for name in FILTERS
        for place in range(len(texts))
        if (ours[name][place] == "") != (theirs[name][place] == "")
    }
    reasons: dict[str, int] = collections.Counter()
    for trial in TRIALS:
        places = sorted({place for _, place in differing})
        if not places:
            break
        changed = [trial.text(texts[place]) for place in places]
        mine = our_decisions(changed, trial.ours)
        peers = ask(python, changed, language="", changes=trial.theirs)["decisions"]
        for row, place in enumerate(places):
            for name in FILTERS:
                if (name, place) in differing and (mine[name][row] == "") == (peers[name][row] == ""):
                    differing.discard((name, place))
                    reasons[f"{name}: {trial.what}"] += 1
    for name, place in differing:
        reasons[f"{name}: unexplained ({ours[name][place] or 'kept'}, {theirs[name][place] or 'kept'})"] += 1
    return dict(reasons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(peer(json.loads(Path(options.peer).read_text()))))
        return

    from harness import environment, finish

    python = environment("filters-datatrove", PACKAGES, constrained=False)
    ours: dict[str, float] = {}
    peers: dict[str, dict[str, float]] = {"datatrove": {}, "datatrove-pipeline": {}}
    quality: dict[str, Any] = {}
    for name, corpus in CORPORA.items():
        every = list(corpus())
        if not every:
            continue
        count = DOCUMENTS[name] // (5 if options.quick else 1)
        texts = random.Random(0).sample(every, min(count, len(every)))
        stock = ask(python, texts, language=LANGUAGES[name], pipeline=True)
        same = ask(python, texts, language="")["decisions"]
        speed, decided = our_speed(texts), our_decisions(texts)
        ours[name] = speed["docs_per_s"]
        peers["datatrove"][name] = len(texts) / stock["seconds"]
        peers["datatrove-pipeline"][name] = len(texts) / stock["pipeline_seconds"]
        quality[name] = {
            "documents": len(texts),
            "kilobytes_a_document": round(sum(len(text.encode()) for text in texts) / len(texts) / 1e3, 2),
            "statistics_mb_per_s": round(speed["statistics_mb_per_s"], 1),
            "equal_to_slow_reference": equal_to_reference(texts),
            "agreement_with_our_words": agreement(decided, same),
            "differences_explained": explained(python, texts, decided, same),
            "agreement_with_its_own_words": agreement(decided, stock["decisions"]),
        }
        print(name, json.dumps(quality[name], indent=2, ensure_ascii=False))
    ratios = {who: min(ours[name] / figures[name] for name in ours) for who, figures in peers.items()}
    finish("filters", ours=ours, peers=peers, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
