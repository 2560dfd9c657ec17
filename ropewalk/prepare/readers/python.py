"""The built-in corpora: docstrings of modules and the topics of `help()`, read from Python's own source files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .item import Input, Item
from .streams import whole


def docstrings(given: Input) -> Iterator[Item]:
    """The docstrings of one module as one document, each under its dotted name."""
    data = whole(given.stream, limit=given.limit)
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        yield Item("", data, "not_python")
        return
    module = given.name.removeprefix("docstrings/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parts = [f"{name}\n\n{text}\n" for name, text in _documented(tree, module)]
    yield Item("", "\n".join(parts).encode("utf-8", "surrogatepass"))


def topics(given: Input) -> Iterator[Item]:
    """The topics of `help()`, one document each, read from the source that the checksum covers."""
    tree = ast.parse(whole(given.stream, limit=given.limit))
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    found: dict[str, str] = ast.literal_eval(tables[0]) if tables else {}
    for name in sorted(found):
        yield Item(f"/{name}", found[name].encode())


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(node: _Documented, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{name}.{child.name}")
