"""Jinja templates of task files, in a sandbox: a template reads a document's fields and nothing else."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.base.errors import DataError, MissingPackage


def render(template: str, document: Mapping[str, Any], *, where: str) -> str:
    """The text of a template with the document's fields; DataError names `where` the template stands."""
    jinja2 = _package()
    try:
        text: str = _compiled(template).render(**document)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{where}: line {error.lineno} of the template: {error.message}") from None
    except jinja2.UndefinedError as error:
        fields = ", ".join(map(str, document))
        raise DataError(f"{where}: {error.message}; a document has the fields {fields}") from None
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, re.error) as error:
        raise DataError(f"{where}: the template fails: {type(error).__name__}: {error}") from None
    return text


def render_chat(template: str, messages: Sequence[Mapping[str, str]], *, end: str, answer: bool) -> str:
    """`messages` in a model's chat template; `answer` opens the model's answer. Without it the text ends with the
    content of the last message, which the model continues."""
    jinja2 = _package()
    try:
        text: str = _compiled_chat(template).render(
            messages=list(messages), add_generation_prompt=answer, eos_token=end, bos_token=""
        )
    except jinja2.TemplateError as error:
        raise DataError(f"the model's chat template fails: {error}") from None
    if answer:
        return text
    last = messages[-1]["content"].strip()
    return text[: text.rindex(last) + len(last)] if last in text else text


@functools.cache
def _environment() -> Any:
    jinja2 = _package()
    from jinja2.sandbox import SandboxedEnvironment

    # Strict, as in lm-eval: a field that is missing is an error, not an empty text.
    found = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    found.filters["regex_replace"] = _regex_replace
    return found


@functools.lru_cache(maxsize=4096)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.lru_cache(maxsize=16)
def _compiled_chat(template: str) -> Any:
    jinja2 = _package()
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # What transformers gives to chat templates.
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    found.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    found.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return found.from_string(template)


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return re.sub(pattern, replacement, text, count=count)


def _package() -> Any:
    try:
        import jinja2
    except ImportError:
        raise MissingPackage("jinja2", "a task written as YAML", "evaluate") from None
    return jinja2
