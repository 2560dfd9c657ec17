"""Nothing public in ropewalk is used by tests alone: what no verb, no page and no other code names is dead."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ropewalk"

HOROVOD = (
    *(f"parallel/horovod.py:{name}" for name in ("allgather", "allgather_async", "allreduce_", "allreduce_async_")),
    *("parallel/horovod.py:fp16", "parallel/horovod.py:local_size"),
)
EXCEPTIONS = {
    "evaluate/lm_eval_bridge.py:BridgedModel": "for lm-evaluation-harness, as docs/guides/evaluation.md shows",
    "model/loss.py:token_losses": "the plain form of the loss, which benchmarks and tests compare the chunked one with",
    "store/blobs.py:write_arrays": "the other half of `write_blobs`, which docs/guides/loading.md shows",
    "store/shards.py:write_shard": "a shard of tokens in one call, for corpora made by hand",
    "train/hooks/layer_health.py:update_ratio": "read by its name in train/hooks/layer_stats.py",
    "load/cache/importance.py:read_draws": "importance of a job on another machine, for readers in Python",
    **dict.fromkeys(HOROVOD, "Horovod's API, in the table of docs/guides/horovod.md"),
}
"""`file:name` -> why it stays although nothing in ropewalk names it."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def public(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Functions and classes of a file and the methods of its classes, without those that a decorator registers."""
    for node in tree_of(path).body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        inner = node.body if isinstance(node, ast.ClassDef) and not _is_called_by_others(node) else []
        for each in (node, *inner):
            if isinstance(each, _DEFINED) and not each.name.startswith("_") and not _is_registered(each):
                yield each.name, each


_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a decorator hands it to the command line."""
    return any(re.search(r"\.(command|callback)\b", ast.unparse(decorator)) for decorator in node.decorator_list)


OWN = ("Protocol", "Generic", "NamedTuple", "Enum", "nn.Module", "Exception")
"""Bases from elsewhere that call no method by a name of theirs, or few."""


def _is_called_by_others(node: ast.ClassDef) -> bool:
    """Whether a library calls the methods of a class, which extends one of its own."""
    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    return any(base not in OWN and base not in classes() for base in bases)


@functools.cache
def classes() -> frozenset[str]:
    """The names of ropewalk's classes."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(tree_of(path)))
    return frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef))


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name that code mentions: variables, attributes, imports, lazy targets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and (target := re.fullmatch(r"ropewalk[\w.]*:(\w+)", str(node.value))):
            yield target[1]


@functools.cache
def mentions() -> Counter[str]:
    """How often ropewalk mentions a name, in all of its files."""
    return Counter(name for path in PACKAGE.rglob("*.py") for name in names_in(tree_of(path)))


@functools.cache
def documented() -> frozenset[str]:
    """Names in the Python of the documentation, and in the examples' files."""
    pages = [path.read_text(encoding="utf-8") for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    return frozenset(name for block in blocks for name in re.findall(r"\w+", block))


@functools.cache
def unused() -> list[str]:
    """What nothing mentions, and what only that mentions, and so on."""
    defined = [(path, name, node) for path in sorted(PACKAGE.rglob("*.py")) for name, node in public(path)]
    own = {id(node): Counter(names_in(node)) for _, _, node in defined}
    left = Counter(mentions())
    dead: list[str] = []
    while True:
        found = [
            (path, name, node)
            for path, name, node in defined
            if name not in documented() and left[name] <= own[id(node)][name]
        ]
        if not found:
            return sorted(dead)
        for path, name, node in found:
            dead.append(f"{path.relative_to(PACKAGE).as_posix()}:{name}")
            left.subtract(own[id(node)])
        inside = {id(inner) for _, _, node in found for inner in ast.walk(node)}
        defined = [each for each in defined if id(each[2]) not in inside]


def test_every_public_name_is_used_by_ropewalk_or_documented() -> None:
    assert sorted(set(unused()) - set(EXCEPTIONS)) == []


def test_every_exception_is_one() -> None:
    assert sorted(set(EXCEPTIONS) - set(unused())) == []
