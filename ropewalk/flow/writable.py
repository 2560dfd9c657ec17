"""Whether results can be written where a recipe and a command want them, asked before any work is done."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ropewalk.base.errors import ConfigError, Problem
from ropewalk.config.read import Resolved
from ropewalk.store.origin import is_url

from .recipe import Recipe

_FOLDER = "prepare.folder"


def check_outputs(resolved: Resolved[Recipe], *, run: Path | None = None) -> None:
    """Makes the folder of prepared data and that in which the `run` will lie; ConfigError, a line for each that cannot
    be written, names the setting."""
    problems = [*_prepared(resolved), *([] if run is None else _run(run))]
    if problems:
        raise ConfigError(problems)


def _prepared(resolved: Resolved[Recipe]) -> Iterator[Problem]:
    name = resolved.value.prepare.folder
    where = resolved.origin(_FOLDER)
    if is_url(name):
        remedy = "prepared data is written to a local folder; name one"
        yield Problem(where, f'`{_FOLDER}`: "{name}" is a URL', remedy)
    elif reason := refusal(Path(name)):
        remedy = "name a folder that you can write, such as `prepared`"
        yield Problem(where, f'`{_FOLDER}`: "{name}" cannot be written: {reason}', remedy)


def _run(run: Path) -> Iterator[Problem]:
    # A run that is not there yet is not begun here: what comes before it may still refuse the recipe.
    if reason := refusal(run if run.exists() else run.parent):
        remedy = "name another folder of runs with --runs, or give the recipe another `name`"
        yield Problem("", f'the run directory "{run}" cannot be written: {reason}', remedy)


def refusal(folder: Path) -> str:
    """Makes `folder`; why no file can be written there, empty when one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except (FileExistsError, NotADirectoryError):
        stands = next((place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), folder)
        return f"{stands} is not a folder"
    except FileNotFoundError:
        above = next((place for place in folder.parents if place.is_dir()), Path("/"))
        return f"the system makes no folders in {above}"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "it is a link that leads in a circle"
        return error.strerror or str(error)
    except ValueError as error:  # a NUL
        return str(error)
