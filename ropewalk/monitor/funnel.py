"""The manifest's counts as a flow: documents and bytes of each source through the steps, to a split or to removal.

Counts are conserved: every inner node has equal inflow and outflow. A manifest whose counts do not add up raises an
error instead of drawing a wrong picture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ropewalk.base.errors import DataError

from .values import mapping, text, whole

KEPT = "kept"
EDITED = "edits: "
"""Prefix of the rule in a node for bytes that edits removed."""

Measure = Literal["documents", "bytes"]

SMALL = 0.005
"""Rules that remove less than this share of the corpus are drawn together; their ribbons would be invisible."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the flow; `bytes` is None if the manifest does not have them. Edits remove bytes only."""

    key: str
    label: str
    kind: Literal["source", "step", "removed", "kept"]
    column: int
    """Sources are in column 0, step i in column i + 1; documents removed by a step share its column."""
    documents: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class FunnelLink:
    """Documents of one source between two nodes."""

    start: str
    end: str
    source: str
    documents: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Flow:
    """The flow of the whole corpus."""

    sources: tuple[str, ...]
    steps: tuple[str, ...]
    nodes: tuple[Node, ...]
    links: tuple[FunnelLink, ...]

    @property
    def knows_bytes(self) -> bool:
        """Whether the manifest has byte counts."""
        return all(link.bytes is not None for link in self.links)


@dataclass(frozen=True, slots=True)
class Count:
    """The counts of one step for one source."""

    source: str
    step: str
    documents_in: int
    documents_out: int
    bytes_in: int
    bytes_out: int
    removed: tuple[tuple[str, int], ...]
    edited: tuple[tuple[str, int], ...]
    removed_bytes: Mapping[str, int]
    """By rule; empty in manifests of earlier versions."""
    edited_bytes: Mapping[str, int]


def read_counts(manifest: Any) -> list[Count]:
    """The counts of every source and step, in the manifest's order; raises DataError if one is missing."""
    sources = mapping(manifest).get("sources")
    if not isinstance(sources, list) or not sources:
        raise DataError("the manifest names no sources")
    return [_count(text(mapping(source).get("name")), step) for source in sources for step in _steps(source)]


def read_flow(manifest: Any) -> Flow:
    """The flow of the manifest; raises DataError if counts are missing or do not add up."""
    counts = read_counts(manifest)
    sources = tuple(dict.fromkeys(count.source for count in counts))
    steps = tuple(dict.fromkeys(count.step for count in counts))
    links: list[FunnelLink] = []
    for source in sources:
        path = [count for count in counts if count.source == source]
        _check(path)
        links += _source_links(path, _splits(manifest, source, path[-1]))
    links = [link for link in links if link.documents or link.bytes]
    return Flow(sources, steps, tuple(_nodes(counts, links, sources, steps)), tuple(links))


def gather_small(flow: Flow, measure: Measure) -> tuple[Flow, list[Node]]:
    """The flow with one node for all rules of a step that each removed less than SMALL, if there are several; and the
    nodes it replaces."""
    whole_corpus = sum(size_of(node, measure) for node in flow.nodes if node.kind == "source")
    small = [
        node for node in flow.nodes if node.kind == "removed" and 0 < size_of(node, measure) < SMALL * whole_corpus
    ]
    targets: dict[str, str] = {}
    nodes = [node for node in flow.nodes if node.kind in ("source", "step")]
    for step in [node for node in flow.nodes if node.kind == "step"]:
        group = [node for node in small if node.column == step.column]
        if len(group) > 1:
            targets |= {node.key: f"removed:{step.label}:other rules ({len(group)})" for node in group}
    links = [dataclasses.replace(link, end=targets.get(link.end, link.end)) for link in flow.links]
    for index, name in enumerate(flow.steps):
        nodes += _ends(links, f"removed:{name}:", "removed", index + 1)
    nodes += _ends(links, "kept:", "kept", len(flow.steps) + 1)
    joined = dataclasses.replace(flow, nodes=tuple(nodes), links=tuple(_joined(links)))
    return joined, [node for node in small if node.key in targets]


def size_of(part: Node | FunnelLink, measure: Measure) -> int:
    """Its documents or bytes."""
    return part.documents if measure == "documents" else part.bytes or 0


def _joined(links: list[FunnelLink]) -> Iterator[FunnelLink]:
    """One link per source between two nodes."""
    found: dict[tuple[str, str, str], list[FunnelLink]] = {}
    for link in links:
        found.setdefault((link.start, link.end, link.source), []).append(link)
    for (start, end, source), parallel in found.items():
        sizes = [link.bytes for link in parallel]
        size = None if None in sizes else sum(size or 0 for size in sizes)
        yield FunnelLink(start, end, source, sum(link.documents for link in parallel), size)


def _steps(source: Any) -> list[Any]:
    steps = mapping(source).get("steps")
    if not isinstance(steps, list) or not steps:
        raise DataError(f"source {text(mapping(source).get('name'))} has no steps")
    return steps


def _count(source: str, step: Any) -> Count:
    row = mapping(step)
    names = ("documents_in", "documents_out", "bytes_in", "bytes_out")
    numbers = [whole(row.get(name)) for name in names]
    wrong = [name for name, value in zip(names, numbers, strict=True) if value is None or value < 0]
    if wrong:
        raise DataError(f"source {source}, step {text(row.get('step'))}: no {', '.join(wrong)}")
    documents_in, documents_out, bytes_in, bytes_out = (value or 0 for value in numbers)
    return Count(
        source=source,
        step=text(row.get("step")),
        documents_in=documents_in,
        documents_out=documents_out,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        removed=tuple((rule, whole(n) or 0) for rule, n in mapping(row.get("removed")).items()),
        edited=tuple((rule, whole(n) or 0) for rule, n in mapping(row.get("edited")).items()),
        removed_bytes={rule: whole(n) or 0 for rule, n in mapping(row.get("removed_bytes")).items()},
        edited_bytes={rule: whole(n) or 0 for rule, n in mapping(row.get("edited_bytes")).items()},
    )


def _check(path: list[Count]) -> None:
    arriving = path[0].documents_in
    for count in path:
        removed = sum(documents for _, documents in count.removed)
        if count.documents_in != arriving or count.documents_in != count.documents_out + removed:
            raise DataError(
                f"source {count.source}, step {count.step}: {arriving} documents arrive, "
                f"{count.documents_in} are counted in, {count.documents_out} out and {removed} removed"
            )
        arriving = count.documents_out


def _splits(manifest: Any, source: str, last: Count) -> dict[str, tuple[int, int | None]]:
    """The kept documents of a source with their bytes, by split if the shards account for all of them."""
    totals: dict[str, tuple[int, int]] = {}
    shards = mapping(manifest).get("shards")
    for shard in shards if isinstance(shards, list) else []:
        row = mapping(shard)
        if row.get("source") == source:
            split = text(row.get("split"))
            documents, size = totals.get(split, (0, 0))
            totals[split] = documents + (whole(row.get("documents")) or 0), size + (whole(row.get("text_bytes")) or 0)
    if sum(documents for documents, _ in totals.values()) != last.documents_out:
        return {KEPT: (last.documents_out, last.bytes_out)}
    # A chat template adds text: then the bytes of the splits differ from those that left the last step.
    exact = sum(size for _, size in totals.values()) == last.bytes_out
    return {split: (documents, size if exact else None) for split, (documents, size) in totals.items()}


def _source_links(path: list[Count], splits: dict[str, tuple[int, int | None]]) -> Iterator[FunnelLink]:
    source = path[0].source
    yield FunnelLink(f"source:{source}", f"step:{path[0].step}", source, path[0].documents_in, path[0].bytes_in)
    for count, following in zip(path, [*path[1:], None], strict=True):
        here = f"step:{count.step}"
        known = count.bytes_in == count.bytes_out + sum(count.removed_bytes.values()) + sum(count.edited_bytes.values())
        for rule, documents in count.removed:
            size = count.removed_bytes.get(rule, 0) if known else None
            yield FunnelLink(here, f"removed:{count.step}:{rule}", source, documents, size)
        for rule, size in count.edited_bytes.items():
            yield FunnelLink(here, f"removed:{count.step}:{EDITED}{rule}", source, 0, size)
        if following is not None:
            yield FunnelLink(
                here, f"step:{following.step}", source, count.documents_out, count.bytes_out if known else None
            )
        else:
            for split, (documents, bytes_kept) in splits.items():
                yield FunnelLink(here, f"kept:{split}", source, documents, bytes_kept if known else None)


def _nodes(
    counts: list[Count], links: list[FunnelLink], sources: tuple[str, ...], steps: tuple[str, ...]
) -> Iterator[Node]:
    for source in sources:
        first = next(count for count in counts if count.source == source)
        yield Node(f"source:{source}", source, "source", 0, first.documents_in, first.bytes_in)
    for index, step in enumerate(steps):
        rows = [count for count in counts if count.step == step]
        documents = sum(count.documents_in for count in rows)
        yield Node(f"step:{step}", step, "step", index + 1, documents, sum(count.bytes_in for count in rows))
        yield from _ends(links, f"removed:{step}:", "removed", index + 1)
    yield from _ends(links, "kept:", "kept", len(steps) + 1)


def _ends(links: list[FunnelLink], prefix: str, kind: Literal["removed", "kept"], column: int) -> Iterator[Node]:
    """The nodes at which links end, the largest first."""
    found: dict[str, list[FunnelLink]] = {}
    for link in links:
        if link.end.startswith(prefix):
            found.setdefault(link.end, []).append(link)
    totals = {key: sum(link.documents for link in ending) for key, ending in found.items()}
    for key, documents in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
        sizes = [link.bytes for link in found[key]]
        size = None if None in sizes else sum(size or 0 for size in sizes)
        yield Node(key, key.removeprefix(prefix), kind, column, documents, size)
