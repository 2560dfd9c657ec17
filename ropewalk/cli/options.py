"""Arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the recipe's, as section.key=value.", show_default=False),
]
RunFolder = Annotated[Path, typer.Argument(help="A run directory, e.g. runs/quickstart.", show_default=False)]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of run directories.")]
New = Annotated[bool, typer.Option("--new", help="Set an existing run aside and start anew.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def verb(*, help: str = "", cls: type[TyperGroup] | None = None) -> typer.Typer:
    """A Typer for one verb file, plain text help and our own errors; `cls` makes its group another than usual."""
    return typer.Typer(
        cls=cls,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=False,
        add_completion=False,
        help=help or None,
    )
