"""What a task file says about one document: its text, target, choices and prefix.

Each is the name of a field, a Jinja template, a list, or a function of a trusted folder. The rules are lm-eval's to the
byte: digits become an index where there are choices, and `[...]` in a target becomes a list of targets.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError

from .functions import load_function
from .task_file import FunctionName, TaskFile
from .template import render

Document = Mapping[str, Any]


class DocFields:
    """Reads documents by a task file."""

    def __init__(self, file: TaskFile, *, trusted: Sequence[Path]) -> None:
        self.file = file
        self._trusted = trusted
        self.features: Collection[str] = ()
        """The fields of the documents that are evaluated: a text that equals one is its name, not a template."""
        self._has_choices = file.get("doc_to_choice") is not None

    def text(self, document: Document, said: Any = None) -> str | int:
        """The question, or the index of the right choice where the choices stand inside the question."""
        value = self._value("doc_to_text", document, said)
        if isinstance(value, str) and self._is_template("doc_to_text", said) and value.isdigit() and self._has_choices:
            return int(value)
        return value if isinstance(value, str | int) else str(value)

    def target(self, document: Document, said: Any = None) -> Any:
        """The right answer: text, index, or a list of them."""
        value = self._value("doc_to_target", document, said)
        if not (isinstance(value, str) and self._is_template("doc_to_target", said)):
            return value
        if value.isdigit() and self._has_choices:
            return int(value)
        if len(value) >= 2 and value[0] == "[" and value[-1] == "]":
            try:
                return ast.literal_eval(value)
            except (SyntaxError, ValueError):
                return value
        return value

    def choices(self, document: Document, said: Any = None) -> list[str]:
        """The answers to choose from, without delimiter."""
        said = self.file.get("doc_to_choice") if said is None else said
        if isinstance(said, dict):
            found: Any = list(said.values())
        elif isinstance(said, list):
            found = said
        else:
            found = self._value("doc_to_choice", document, said)
            if isinstance(found, str) and self._is_template("doc_to_choice", said):
                try:
                    found = ast.literal_eval(found)
                except (SyntaxError, ValueError):
                    raise self._wrong("doc_to_choice", f"gives no list: {found[:80]!r}") from None
        if not isinstance(found, list | tuple) or not found:
            raise self._wrong("doc_to_choice", f"gives no list of choices, but {found!r}")
        return [each if isinstance(each, str) else str(each) for each in found]

    def prefix(self, document: Document) -> str | None:
        """The beginning of the answer, `gen_prefix`."""
        said = self.file.get("gen_prefix")
        return None if said is None else str(self._value("gen_prefix", document, said))

    def resolved(self, document: Document, key: str, said: str | None) -> str:
        """A field of the document, or a template; empty without either."""
        if not said:
            return ""
        return document[said] if said in document else render(said, document, where=self.file.where(key))

    def query(self, document: Document) -> str:
        """The text to look for in the training corpus."""
        said = self.file.get("doc_to_decontamination_query")
        return "" if said is None else str(self._value("doc_to_decontamination_query", document, said))

    def function(self, said: Any, key: str) -> Callable[..., Any]:
        """The function that `!function` names under `key`."""
        if not isinstance(said, FunctionName):
            raise self._wrong(key, "must be `!function module.name`")
        return load_function(said, trusted=self._trusted, where=self.file.where(key))

    def _value(self, key: str, document: Document, said: Any) -> Any:
        said = self.file.get(key) if said is None else said
        if isinstance(said, FunctionName):
            return self.function(said, key)(document)
        if not isinstance(said, str):
            return said
        if said in self.features:
            if said not in document:
                raise self._wrong(key, f"names the field `{said}`, which this document lacks: {str(document)[:120]}")
            return document[said]
        return render(said, document, where=self.file.where(key))

    def _is_template(self, key: str, said: Any) -> bool:
        said = self.file.get(key) if said is None else said
        return isinstance(said, str) and said not in self.features

    def _wrong(self, key: str, what: str) -> DataError:
        return self.file.wrong(key, what)
