"""What lies in the files that somebody wants to train on, and how a recipe reads it.

Only samples are read: the beginnings of some files of each kind. Sizes of all files are known; what is in them is
estimated from the samples.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import posixpath
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.base.progress import amount, counted

from .. import remote
from ..config import Source
from ..formats import kind_of, named_kind
from ..sources import Found, expand
from .content import WORDS
from .looks import Format, Look, look_at, sample_of
from .records import Key
from .scripts import Writing, writing_of
from .splits import FEWEST_DOCUMENTS, LARGE_BYTES, Cut, best_cut

_SAMPLED_FILES, _SAMPLED_RECORD_FILES = 8, 64
"""Of each kind by name; files of records may differ in their keys."""
_BEGINNING_BYTES, _LARGE_BEGINNING_BYTES = 1 << 19, 1 << 21
"""Of every file that is looked at; and of large files of text, for how they are cut."""
_LANGUAGE_CHARACTERS = 400_000
_MOST_PATHS = 24
"""Files of a source that are named one by one."""
_CODE = frozenset(
    {
        *("py", "pyi", "c", "h", "cc", "cpp", "cxx", "hpp", "cu", "java", "kt", "scala", "js", "jsx", "ts", "tsx"),
        *("go", "rs", "rb", "php", "swift", "jl", "lua", "pl", "hs", "ml", "sh"),
    }
)
"""Endings of files whose empty lines end no document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of a source that was found, and why."""

    value: Any
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """A source that was found: how it is read, and what it holds, as an estimate."""

    name: str
    paths: tuple[str, ...]
    settings: dict[str, Setting]
    """By key of `[[prepare.sources]]`, without `name` and `paths`."""
    content: str
    """What it is, in words."""
    files: int
    file_bytes: int
    text_bytes: int
    documents: int
    document_characters: tuple[int, int]
    """Median, and the length that nine of ten documents do not exceed."""
    writing: Writing
    largest_file_bytes: int
    notes: tuple[str, ...] = ()
    """What the reader of the recipe should know."""

    @property
    def is_chat(self) -> bool:
        """Whether it holds dialogues."""
        return "format" in self.settings and self.settings["format"].value == "chat"


@dataclass(frozen=True, slots=True)
class _Way:
    """How files are read: those of one way are one source."""

    format: Format
    text_keys: tuple[str, ...]
    parallel: bool
    plain: bool
    """Whether they have no keys, so that any text key does."""


def survey(paths: Sequence[str]) -> tuple[list[Surveyed], list[str]]:
    """The sources that these files, folders, globs or URLs hold, and remarks on what is left out.

    Raises UserError when a path gives nothing that can be read.
    """
    sources: list[Surveyed] = []
    notes: list[str] = []
    for path in paths:
        found, remarks = _survey_path(path, taken=[source.name for source in sources])
        sources += found
        notes += remarks
    return sources, notes


def _survey_path(path: str, *, taken: list[str]) -> tuple[list[Surveyed], list[str]]:
    source = Source(name="new", paths=(path,))
    match = expand(path, source)
    files = match.files or tuple(Found(name, name, named_kind(name, source)) for name in match.passed_over)
    if not files:
        what = "no file is in it" if os.path.isdir(path) else "no such file"
        raise UserError(f"{path}: {what}; name text files, a folder of them or a glob")
    looks = list(_looks(files, source))
    useless = [look for look in looks if look.trouble]
    # Files whose endings say nothing are taken for text only where most of them are.
    if len(useless) == len(looks) or (not match.files and 2 * len(useless) > len(looks)):
        told = "\n".join(f"{look.found.location}: {look.trouble}" for look in useless[:5])
        raise UserError(f"{told}\nnothing of {path} can be read; name other files")
    notes = [*_passed_over(path, match.passed_over if match.files else ()), *_useless(path, useless)]
    groups = _grouped([look for look in looks if not look.trouble], files)
    alone = len(groups) == 1 and 2 * len(useless) < len(looks)
    sources: list[Surveyed] = []
    for way, group in groups.items():
        named = (path,) if alone and _takes(way, group, path) else _names(path, group, everything=match)
        for key in way.text_keys if way.parallel else (way.text_keys or ("text",))[:1]:
            label = _label(path if len(groups) == 1 else _common_name(path, group, way), key if way.parallel else "")
            label = _unique(label, [*taken, *(each.name for each in sources)])
            sources.append(_surveyed(label, named, way, key, group))
    return sources, notes


@dataclass(slots=True)
class _Group:
    """Files that are read in one way."""

    looks: list[Look] = dataclasses.field(default_factory=list)
    files: list[Found] = dataclasses.field(default_factory=list)
    """All of them, also those that were not looked at."""


def _looks(files: Sequence[Found], source: Source) -> Iterator[Look]:
    """Looks at some files of each kind by name."""
    for same in _by_name(files).values():
        records = same[0].kind.reader in ("jsonl", "json", "parquet")
        for file in _spread(same, _SAMPLED_RECORD_FILES if records else _SAMPLED_FILES):
            large = file.kind.reader == "text" and not remote.is_url(file.location)
            large = large and os.stat(file.location).st_size > LARGE_BYTES
            yield look_at(file, source, most=_LARGE_BEGINNING_BYTES if large else _BEGINNING_BYTES)


def _by_name(files: Iterable[Found]) -> dict[tuple[str, ...], list[Found]]:
    """The files by how their names say that they are read."""
    found: dict[tuple[str, ...], list[Found]] = defaultdict(list)
    for file in files:
        found[file.kind.reader or "", file.kind.packing, _ending(file)].append(file)
    return found


def _spread(files: Sequence[Found], most: int) -> list[Found]:
    """At most so many, evenly from first to last."""
    if len(files) <= most:
        return list(files)
    return [files[place * (len(files) - 1) // (most - 1)] for place in range(most)]


def _grouped(looks: Sequence[Look], files: Sequence[Found]) -> dict[_Way, _Group]:
    """The files by the way they are read; one that was not looked at goes with most others of its kind."""
    ways = {look.found.location: _way(look) for look in looks}
    groups: dict[_Way, _Group] = {}
    for same in _by_name(files).values():
        known = [ways[file.location] for file in same if file.location in ways]
        if not known:
            continue
        usual = Counter(known).most_common(1)[0][0]
        sampled = len(same) <= _SAMPLED_FILES
        for file in same:
            if file.location in ways or not sampled:
                groups.setdefault(ways.get(file.location, usual), _Group()).files.append(file)
    for look in looks:
        groups[ways[look.found.location]].looks.append(look)
    return _merged(groups)


def _way(look: Look) -> _Way:
    shape = look.shape
    if shape is None:
        return _Way(look.format, (), parallel=False, plain=True)
    return _Way(look.format, shape.text_keys, parallel=shape.kind == "parallel", plain=False)


def _merged(groups: dict[_Way, _Group]) -> dict[_Way, _Group]:
    """Files without keys go with records that need no format of their own: one source reads both."""
    plain = next((way for way in groups if way.plain and way.format == "auto"), None)
    others = [way for way in groups if not way.plain and way.format == "auto" and not way.parallel]
    if plain is None or len(others) != 1:
        return groups
    groups[others[0]].looks += groups[plain].looks
    groups[others[0]].files += groups[plain].files
    del groups[plain]
    return groups


def _takes(way: _Way, group: _Group, path: str) -> bool:
    """Whether a source takes these files when its paths name `path`."""
    settings = Source(name="x", paths=(path,), format=way.format)
    return all(kind_of(file.location, settings).reader for file in group.files) or not _is_folder(path)


def _is_folder(path: str) -> bool:
    return not remote.is_url(path) and os.path.isdir(os.path.expanduser(path))


def _names(path: str, group: _Group, *, everything: Any) -> tuple[str, ...]:
    """Globs by ending where they mean these files and no others, else the files one by one."""
    wanted = {file.location for file in group.files}
    present = [*(file.location for file in everything.files), *everything.passed_over]
    if _is_folder(path) and len(wanted) > 1:
        endings = sorted({name[len(_stem(name)) :] for name in wanted})
        if all(endings) and {name for name in present if name[len(_stem(name)) :] in endings} == wanted:
            deep = any(posixpath.dirname(name) != path.rstrip("/") for name in wanted)
            return tuple(f"{glob.escape(path.rstrip('/'))}/{'**/' if deep else ''}*{ending}" for ending in endings)
    return tuple(sorted(wanted))


def _ending(file: Found) -> str:
    """Of its name without its packing."""
    return posixpath.splitext(file.kind.name)[1].lower()


def _stem(name: str) -> str:
    """Without its ending, or the two of a packed file."""
    inner = kind_of(name, Source(name="x", paths=("x",))).name
    return name[: len(posixpath.splitext(inner)[0])]


def _surveyed(label: str, paths: tuple[str, ...], way: _Way, key: str, group: _Group) -> Surveyed:
    samples = {look.found.location: sample_of(look, key, format=way.format) for look in group.looks}
    sampled_bytes = sum(look.size for look in group.looks)
    file_bytes = _total_size(group)
    scale = file_bytes / sampled_bytes if sampled_bytes else 1.0
    settings = _settings(way, key, group)
    texts = [text for sample in samples.values() for text in sample.texts]
    lengths = sorted(len(text) for text in texts) or [0]
    single = all(sample.documents == 1 for sample in samples.values())
    documents = len(group.files) if single else sum(sample.documents for sample in samples.values()) * scale
    text_bytes = round(sum(sample.text_bytes for sample in samples.values()) * scale)
    cut, cut_bytes = _cut(group, documents)
    if cut:
        documents = cut.documents * text_bytes / max(1, cut_bytes)
        lengths = [round(cut.median_characters)]
        settings |= _cut_settings(cut, group, file_bytes, round(documents))
    return Surveyed(
        name=label,
        paths=paths,
        settings=settings,
        content=_content(group),
        files=len(group.files),
        file_bytes=file_bytes,
        text_bytes=text_bytes,
        documents=max(1, round(documents)),
        document_characters=(round(statistics.median(lengths)), lengths[int(0.9 * (len(lengths) - 1))]),
        writing=writing_of(_shares(texts, _LANGUAGE_CHARACTERS)),
        largest_file_bytes=max(look.unpacked for look in group.looks),
        notes=tuple(_remarks(group, way, key)),
    )


def _shares(texts: Sequence[str], most: int) -> list[str]:
    """The beginnings of the texts, together about `most` characters."""
    share = max(200, most // max(1, len(texts)))
    shown, left = [], most
    for text in texts:
        if left <= 0:
            break
        shown.append(text[: min(share, left)])
        left -= len(shown[-1])
    return shown


def _total_size(group: _Group) -> int:
    known = {look.found.location: look.size for look in group.looks}
    total = 0
    for file in group.files:
        if file.location in known:
            total += known[file.location]
        elif not remote.is_url(file.location):
            total += os.stat(file.location).st_size
        else:
            total += sum(known.values()) // len(known)
    return total


def _settings(way: _Way, key: str, group: _Group) -> dict[str, Setting]:
    """Those that differ from the defaults."""
    found: dict[str, Setting] = {}
    shape = next((look.shape for look in group.looks if look.shape), None)
    if way.format == "chat":
        found["format"] = Setting(value="chat", reason=f"found {shape.chat}" if shape else "")
        if way.text_keys:
            found["text_key"] = Setting(value=key, reason="here are the turns")
    elif way.format != "auto":
        found["format"] = Setting(value=way.format, reason=f"found {_content(group)}, which the names do not tell")
    if shape and way.format != "chat" and key != "text":
        found["text_key"] = Setting(value=key, reason=_key_reason(shape.keys, key, parallel=way.parallel))
    if shape:
        found |= dict(_labels(shape.keys))
    code = [file for file in group.files if _ending(file) == ".py" and file.kind.reader == "text"]
    if 2 * len(code) > len(group.files):
        found["domain"] = Setting(value="code", reason="most files are Python: completions are checked by its parser")
    return found


def _key_reason(keys: Sequence[Key], key: str, *, parallel: bool) -> str:
    found = next((each for each in keys if each.name == key), None)
    length = f", about {found.characters:,.0f} characters" if found else ""
    if parallel:
        return f"the same text in several languages: each is a source of its own{length}"
    others = [each.name for each in keys if each.name != key and "." not in each.name]
    return f"the text{length}; the records also have {', '.join(others[:8])}" if others else f"the text{length}"


_LABEL_KEYS = {
    "url_key": ("url", "link", "uri", "source_url"),
    "time_key": ("date", "timestamp", "created_at", "created", "published", "year"),
    "license_key": ("license", "licence"),
}
"""Usual names of what goes with a document into the ledger."""


def _labels(keys: Sequence[Key]) -> Iterator[tuple[str, Setting]]:
    names = {key.name for key in keys if key.kind in ("text", "number")}
    fields = Source.__dataclass_fields__
    for setting, usual in _LABEL_KEYS.items():
        if setting in fields and fields[setting].default not in names:
            found = next((name for name in usual if name in names), None)
            if found:
                yield setting, Setting(value=found, reason="found in the records")


def _cut(group: _Group, documents: float) -> tuple[Cut | None, int]:
    """How files of text are cut, and how many bytes that was tried on, when a large one is among them or there are very
    few; None where cutting would not give more documents."""
    texts = [look for look in group.looks if look.records is None and look.beginning.kind.reader in ("text", "latex")]
    large = [look for look in texts if look.unpacked > LARGE_BYTES]
    looked = large or (texts if documents < FEWEST_DOCUMENTS and len(texts) == len(group.looks) else [])
    if not looked:
        return None, 0
    shown = [sample_of(look, "", format="auto").texts[0] for look in looked]
    code = [look for look in looked if _ending(look.found).lstrip(".") in _CODE]
    cut = best_cut(shown, prose=2 * len(code) < len(looked))
    return (cut, sum(len(look.beginning.data) for look in looked)) if cut.documents > len(looked) else (None, 0)


def _cut_settings(cut: Cut, group: _Group, file_bytes: int, documents: int) -> dict[str, Setting]:
    how = {
        "blank-lines": "at blank lines",
        "separator": f"at `{cut.separator}`",
        "headings": "before headings",
        "size": "at paragraph ends, about every 4,000 characters,",
    }[cut.split]
    many = "one file" if len(group.files) == 1 else f"{len(group.files):,} files"
    reason = (
        f"{amount(file_bytes, 'B')} in {many}: cut {how} into about {_rounded(documents):,} documents; {cut.reason}"
    )
    found = {"split": Setting(value=cut.split, reason=reason)}
    if cut.split == "separator":
        found["separator"] = Setting(value=cut.separator, reason="found in the files")
    return found


def _rounded(number: int) -> int:
    """To two digits."""
    digits = max(0, len(str(number)) - 2)
    return round(number, -digits)


def _content(group: _Group) -> str:
    """What the files are, in words."""
    counts = Counter(look.content for look in group.looks)
    first = " and ".join(WORDS[content] for content, _ in counts.most_common(2))
    packings = Counter(look.beginning.kind.packing for look in group.looks if look.beginning.kind.packing)
    packed = {"gzip": "gzip", "zstd": "Zstandard", "bz2": "bzip2"}
    return first + (f", packed with {packed[packings.most_common(1)[0][0]]}" if packings else "")


def _remarks(group: _Group, way: _Way, key: str) -> Iterator[str]:
    shape = next((look.shape for look in group.looks if look.shape), None)
    if shape and shape.others and not way.parallel:
        others = ", ".join(f"`{each.name}` ({each.characters:,.0f} characters)" for each in shape.others[:5])
        yield f"text under other keys is not read: {others}"
    if shape and key.split(".")[-1].lower() in ("html", "raw_html"):
        yield f"`{key}` may hold HTML, which is read as it stands, with its tags"
    if any(_ending(file) in (".csv", ".tsv") for file in group.files):
        yield "CSV is read as plain text, one document a file; write a column as JSON lines to read it alone"


def _common_name(path: str, group: _Group, way: _Way) -> str:
    """What a source is named after when its path has several: its only file, else its key or its ending."""
    if len(group.files) == 1:
        return group.files[0].location
    part = "chat" if way.format == "chat" else way.text_keys[0] if way.text_keys else "text"
    return f"{_stem(path.rstrip('/*'))}-{part}"


def _label(path: str, part: str) -> str:
    name = posixpath.basename(path.rstrip("/*")) or "text"
    stem = _stem(name) or name
    label = "".join(
        letter if letter.isalnum() or letter in "-_" else "-" for letter in f"{stem}-{part}" if part or stem
    )
    return label.strip("-") or "text"


def _unique(label: str, taken: Sequence[str]) -> str:
    number = next(n for n in range(len(taken) + 1) if (f"{label}-{n}" if n else label) not in taken)
    return f"{label}-{number}" if number else label


def _passed_over(path: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    endings = Counter(posixpath.splitext(name)[1] or "no ending" for name in names)
    listed = ", ".join(f"{ending} {count}" for ending, count in endings.most_common(5))
    return [f"{path}: {counted(len(names), 'file')} with other endings passed over ({listed}); a glob takes them"]


def _useless(path: str, looks: Sequence[Look]) -> list[str]:
    told = [f"{look.found.location}: nothing of it is read: {look.trouble}" for look in looks[:5]]
    left = len(looks) - len(told)
    return [*told, f"{path}: the same of {left} more of the files that were looked at"] if left else told
