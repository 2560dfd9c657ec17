"""Arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)]
RecipeOrRun = Annotated[
    Path, typer.Argument(help="The recipe, a TOML file, or a run directory for its settings.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the recipe's, as section.key=value.", show_default=False),
]
RunFolder = Annotated[Path, typer.Argument(help="A run directory, e.g. runs/quickstart.", show_default=False)]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of run directories.")]
New = Annotated[bool, typer.Option("--new", help="Set an existing run aside and start anew.")]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Number of processes on this machine. Default: as many as [parallel] asks for.",
        show_default=False,
    ),
]
MOST_TOKENS = 1 << 20
"""Maximum tokens to add to a prompt."""
MOST_RANKS = 1 << 16
"""Maximum ranks, nodes and cores; a larger number is a typing error and would take forever."""
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", min=0.0, max=1.0, help="Draw from the fewest tokens whose probabilities sum to at least this."
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", min=0.0, max=1.0, help="Leave out tokens whose probability is below this share of the largest."
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", min=0.01, help="Above 1, makes tokens less likely that occurred before; 1: off."
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text before which to end; may be given several times.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def verb(*, help: str = "", cls: type[TyperGroup] | None = None) -> typer.Typer:
    """A Typer for one verb file, with plain-text help and our own errors; `cls` replaces the class of its group."""
    return typer.Typer(
        cls=cls,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=False,
        add_completion=False,
        help=help or None,
    )


class WithDefault(TyperGroup):
    """A group whose first word may be a recipe instead of a command; the hidden command then runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self._default, *args])

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in self.commands if name != self._default]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["RECIPE [OVERRIDES]...", "|", "COMMAND"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.commands[self._default].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    @property
    def _default(self) -> str:
        return next(name for name, command in self.commands.items() if command.hidden)
