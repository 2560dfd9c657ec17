"""The funnel: no document appears or disappears between the manifest and the drawing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.monitor.draw.sankey import draw_flow
from ropewalk.monitor.funnel import SMALL, Flow, gather_small, read_flow
from ropewalk.monitor.report.corpus_section import funnel_figures
from ropewalk.monitor.run_view import read_run

RULES = st.dictionaries(st.sampled_from(["short", "long", "symbols", "repeats"]), st.integers(0, 50))


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """Manifests whose counts add up: one to four sources through the same one to four steps."""
    steps = [f"step {i}" for i in range(draw(st.integers(1, 4)))]
    sources, shards = [], []
    for name in [f"source {i}" for i in range(draw(st.integers(1, 4)))]:
        removed = [draw(RULES) for _ in steps]
        kept = draw(st.integers(0, 1000))
        left = kept + sum(sum(rules.values()) for rules in removed)
        cut = [draw(st.integers(0, 9)) for _ in steps]
        rows = []
        size = 10 * left + sum(cut)
        for step, rules, edits in zip(steps, removed, cut, strict=True):
            out, out_bytes = left - sum(rules.values()), size - 10 * sum(rules.values()) - edits
            rows.append(
                {"step": step, "documents_in": left, "documents_out": out, "bytes_in": size, "bytes_out": out_bytes}
                | {"removed": rules, "edited": {"cut": 1}, "edited_bytes": {"cut": edits}}
                | {"removed_bytes": {rule: 10 * documents for rule, documents in rules.items()}}
            )
            left, size = out, out_bytes
        sources.append({"name": name, "domain": "x", "weight": 1.0, "steps": rows})
        held = draw(st.integers(0, kept))
        train, validation = 10 * (kept - held), 10 * held
        shards += [{"source": name, "split": "train", "documents": kept - held, "text_bytes": train}]
        shards += [{"source": name, "split": "validation", "documents": held, "text_bytes": validation}]
    return {"sources": sources, "shards": shards}


def assert_conserved(flow: Flow, measure: str = "documents") -> None:
    for node in flow.nodes:
        arriving = sum(getattr(link, measure) for link in flow.links if link.end == node.key)
        leaving = sum(getattr(link, measure) for link in flow.links if link.start == node.key)
        assert getattr(node, measure) == (leaving if node.kind == "source" else arriving)
        assert getattr(node, measure) == (arriving if node.kind in ("kept", "removed") else leaving)


@given(manifests())
def test_as_many_documents_leave_each_node_as_arrive(manifest: dict[str, Any]) -> None:
    flow = read_flow(manifest)
    assert_conserved(flow)
    total = sum(node.documents for node in flow.nodes if node.kind == "source")
    assert total == sum(node.documents for node in flow.nodes if node.kind in ("kept", "removed"))
    assert draw_flow(flow).startswith("<svg")


@given(manifests())
def test_as_many_bytes_leave_each_node_as_arrive(manifest: dict[str, Any]) -> None:
    flow = read_flow(manifest)
    assert flow.knows_bytes
    assert_conserved(flow, "bytes")
    assert draw_flow(flow, "bytes").startswith("<svg")


def test_a_manifest_that_does_not_count_bytes_by_rule_gives_documents_alone(run: Path) -> None:
    assert not read_flow(read_run(run).manifest).knows_bytes


def test_the_flow_of_a_run_is_conserved_and_ends_in_its_splits(run: Path) -> None:
    flow = read_flow(read_run(run).manifest)
    assert_conserved(flow)
    ends = {node.label: node.documents for node in flow.nodes if node.kind == "kept"}
    assert ends == {"train": 2190, "validation": 47}


def test_shards_that_do_not_account_for_all_documents_end_in_one_node(run: Path) -> None:
    manifest = {**read_run(run).manifest, "shards": []}
    flow = read_flow(manifest)
    assert_conserved(flow)
    assert [node.label for node in flow.nodes if node.kind == "kept"] == ["kept"]


def test_counts_that_do_not_add_up_are_refused_by_name(run: Path) -> None:
    manifest: Any = read_run(run).manifest
    manifest["sources"][0]["steps"][1]["removed"]["min_characters"] += 1
    with pytest.raises(DataError, match="source stdlib, step filter"):
        read_flow(manifest)


def test_labels_of_removed_documents_do_not_overlap(run: Path) -> None:
    flow = read_flow(read_run(run).manifest)
    drawing = draw_flow(flow)
    places = [part.split(">")[0] for part in drawing.split("<text ")[1:]]
    at = [tuple(part.split('"')[i] for i in (1, 3)) for part in places]
    assert len(at) == len(set(at))
    for x in {x for x, _ in at}:
        heights = sorted(float(y) for other, y in at if other == x)
        assert all(b - a >= 14 for a, b in itertools.pairwise(heights))


@given(manifests(), st.sampled_from(["documents", "bytes"]))
def test_rules_joined_for_the_drawing_lose_no_document_and_are_each_small(
    manifest: dict[str, Any], measure: str
) -> None:
    flow = read_flow(manifest)
    drawn, small = gather_small(flow, measure)
    assert_conserved(drawn, measure)
    corpus = sum(getattr(node, measure) for node in flow.nodes if node.kind == "source")
    assert all(0 < getattr(node, measure) < SMALL * corpus for node in small)
    gone = {node.key for node in flow.nodes} - {node.key for node in drawn.nodes}
    assert gone == {node.key for node in small}


def test_forty_rules_are_a_low_drawing_with_the_small_ones_in_a_table() -> None:
    removed = {"large": 3000} | {f"rule_{number}": number + 1 for number in range(39)}
    kept = 20_000
    step = {"step": "filter", "documents_in": kept + sum(removed.values()), "documents_out": kept}
    step |= {"bytes_in": 0, "bytes_out": 0, "removed": removed}
    manifest = {"sources": [{"name": "books", "domain": "x", "weight": 1.0, "steps": [step]}], "shards": []}
    drawing, table = str(draw_flow(gather_small(read_flow(manifest), "documents")[0])), str(funnel_figures(manifest)[0])
    assert float(drawing.split('viewBox="0 0 ')[1].split()[1].rstrip('">')) < 500
    assert "other rules (39)" in drawing
    assert all(f"rule_{number}" in table for number in range(39))
