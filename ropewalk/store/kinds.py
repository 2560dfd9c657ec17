"""Every kind of file that ropewalk writes and reads back: where it lies, what protects it, what happens to damage.

`docs/formats.md` prints this table, and tools that damage files on purpose draw from it. A *derived* file is made again
with a message; a *result* is refused by name, with the command that makes it anew.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal

Role = Literal["derived", "result"]


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of file."""

    pattern: str
    """Below the folder of prepared data (`prepared/...`), the run (`run/...`), the user's cache (`cache/...`) or
    another folder that the recipe names."""
    role: Role
    protection: str
    when_damaged: str


FRAME = "xxh3-64 of every MiB, footer with a hash"
FOOTER = "footer: key, length, xxh3-64"
SEAL = "seal: length, BLAKE2b"
LISTED = "xxh3-64 in the sealed manifest"
AGAIN = "made again when the stage is next asked for it"
COPY = "another copy, or an older checkpoint, is taken"

KINDS = (
    FileKind("prepared/*/manifest.json", "result", SEAL, "refused; `prepare` makes it anew from stages and shards"),
    FileKind("prepared/*/tokenizer.json", "result", LISTED, "refused; `prepare` makes it anew"),
    FileKind("prepared/*/*.tokens", "result", FRAME, "refused; without it `prepare` writes it anew"),
    FileKind("prepared/*/*.references", "result", FRAME, "refused; without it `prepare` writes it anew"),
    FileKind("prepared/*/ledger.parquet", "result", LISTED, "refused; `prepare` makes it anew"),
    FileKind("prepared/*/statistics.parquet", "result", LISTED, "refused; `prepare` makes it anew"),
    FileKind("prepared/*/samples.parquet", "result", LISTED, "refused; `prepare` makes it anew"),
    FileKind("prepared/*/repeats.parquet", "result", LISTED, "refused; `prepare` makes it anew"),
    FileKind("prepared/*/report.json", "derived", SEAL, "`prepare report` writes it anew each time"),
    FileKind("prepared/*/ngrams-*/index.json", "result", SEAL, "refused; delete the index, `prepare` makes it anew"),
    FileKind("prepared/*/ngrams-*/*.hashes", "result", "xxh3-64 in `index.json`", "as `index.json`"),
    FileKind("prepared/*/ngrams-*/*.places", "result", "xxh3-64 in `index.json`", "as `index.json`"),
    FileKind("prepared/*/ngrams-*.work/*.entries", "derived", FOOTER, AGAIN),
    FileKind("prepared/*/layouts/*.bin", "derived", FRAME + " that has the key", "made again by the loader"),
    FileKind("prepared/stages/checksums/files.arrow", "derived", FOOTER, "forgotten; input files are read again"),
    FileKind("prepared/stages/used/*.json", "result", SEAL, "`prepare prune` refuses; stages may be deleted"),
    FileKind("prepared/stages/encode/*.tokens", "derived", FRAME + " that has the key", AGAIN),
    FileKind("prepared/stages/substring/*/*.parquet", "derived", FOOTER, AGAIN),
    FileKind("prepared/stages/substring/*/work*", "derived", FOOTER, "looked for from the beginning"),
    FileKind("prepared/stages/*/*.arrow", "derived", FOOTER, AGAIN),
    FileKind("prepared/stages/tokenizer/*.json", "derived", FOOTER, AGAIN),
    FileKind("near-index/index.json", "result", SEAL, "refused; restore a copy or begin another index"),
    FileKind(
        "near-index/*.arrow", "result", "xxh3-64 in `index.json`", "refused; restore a copy or begin another index"
    ),
    FileKind("run/config.toml", "result", SEAL, "refused where there is a checkpoint, else written anew"),
    FileKind("run/stages/*.json", "derived", SEAL, "`run` goes through the stage again; a worker refuses"),
    FileKind("run/plan.json", "derived", SEAL, "`run` makes it anew; a worker refuses"),
    FileKind("run/evaluation/results.json", "derived", SEAL, "`run` measures again; pages leave it out by name"),
    FileKind(
        "run/evaluation/documents.jsonl", "derived", SEAL, "`run` measures again; `compare` leaves it out by name"
    ),
    FileKind("run/evaluation/items.jsonl", "derived", SEAL, "`run` measures again"),
    FileKind(
        "run/evaluation/answers.jsonl", "derived", "CRC-32 as the last key of each line", "the model is asked again"
    ),
    FileKind("run/samples.jsonl", "derived", SEAL, "`run` measures again; pages leave it out by name"),
    FileKind("run/summary.json", "derived", SEAL, "`run` writes it anew; pages leave it out by name"),
    FileKind("run/doctor.json", "result", SEAL, "refused; without it the doctor begins with no predictions"),
    FileKind("run/checkpoints/*/manifest.json", "result", "xxh3-64 as its last key", "an older checkpoint is taken"),
    FileKind("run/checkpoints/*/*", "result", "xxh3-64 of every 4 MiB in its manifest", "an older checkpoint is taken"),
    FileKind("run/checkpoints/copies.json", "result", SEAL, "refused; without it copies begin anew"),
    FileKind("run/checkpoints/frequency.json", "derived", SEAL, 'told; `checkpoint.save_every = "auto"` learns anew'),
    FileKind("run/events*.jsonl", "result", "CRC-32 as the last key of each line", "the line is left out"),
    FileKind("memory/*/*/*/manifest.json", "derived", "xxh3-64 as its last key", COPY),
    FileKind("memory/*/*/*/*", "derived", "xxh3-64 of every 4 MiB in its manifest", COPY),
    FileKind("remote/*/*/manifest.json", "result", "xxh3-64 as its last key", COPY),
    FileKind("remote/*/*/*", "result", "xxh3-64 of every 4 MiB in its manifest", COPY),
    FileKind("cache/products/*.json", "derived", FOOTER, "kernels are measured again"),
    FileKind("cache/speed.json", "derived", SEAL, "this machine is measured again"),
    FileKind("disk-cache/items/*/*.item", "derived", "trailer: item, length, xxh3-64", "fetched again"),
    FileKind("disk-cache/importance-*.bin", "derived", "header: count, xxh3-64", "does not count"),
)

UNREAD: dict[str, str] = {
    "prepared/*/report.html": "only shown",
    "run/report.html": "only shown",
    "run/checkpoints/latest.json": "for people and scripts",
    "run/heartbeats/*.json": "what a rank does now",
    "run/hang-*.txt": "only shown",
    "run/ropewalk-traceback-*.txt": "only shown",
    "run/logs/*": "what processes print",
    "run/worker.log": "what processes print",
    "run/verify.json": "read by the command that has just written it",
    "run/profile/*.json": "read by the command that has just written it",
    "run/timeline/*.json": "read by the command that has just written it",
    "memory/*/.ropewalk-memory": "its name says all",
    "disk-cache/lock": "locks and counts of the processes that are there now",
    "disk-cache/members": "locks and counts of the processes that are there now",
    "disk-cache/used": "locks and counts of the processes that are there now",
}
"""Files without a checksum, by pattern, and why they need none. Beside them there are only `.lock` and `*.partial`."""


def kind_of(name: str) -> FileKind | None:
    """The kind of a file by its name below the folders that KINDS speaks of; None for one that nobody reads back."""
    found = (kind for kind in KINDS if fnmatch.fnmatchcase(name, kind.pattern))
    return max(found, key=lambda kind: len(kind.pattern), default=None)  # the longest says most: a star crosses folders


def table() -> str:
    """KINDS as a table in Markdown."""
    rows = [f"| `{kind.pattern}` | {kind.role} | {kind.protection} | {kind.when_damaged} |" for kind in KINDS]
    return "\n".join(["| file | kind | protected by | when it is damaged |", "|---|---|---|---|", *rows])
