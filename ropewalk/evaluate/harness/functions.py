"""Imports `!function` of task files from folders that the recipe trusts: the code runs with all rights of the user."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError, UserError

from .task_file import FunctionName


def load_function(function: FunctionName, *, trusted: Sequence[Path], where: str) -> Callable[..., Any]:
    """The function; UserError unless its file lies in a trusted folder."""
    module, _, name = function.name.rpartition(".")
    if not module:
        raise DataError(f"{where}: `!function {function.name}` names no module; write module.function")
    file = (function.folder / f"{module.replace('.', '/')}.py").resolve()
    if not any(file.is_relative_to(folder.resolve()) for folder in trusted):
        folder = file.parent
        raise UserError(
            f"{where}: `!function {function.name}` runs the Python of {file}; read it, then trust its folder with "
            f'`evaluate.trusted_folders = ["{folder}"]`'
        )
    if not file.is_file():
        raise DataError(f"{where}: `!function {function.name}`: no file {file}")
    found = getattr(_imported(file), name, None)
    if not callable(found):
        raise DataError(f"{where}: `!function {function.name}`: {file} has no function `{name}`")
    return found


def _imported(file: Path) -> Any:
    """The module in `file`, under a name of its own: many folders have a `utils.py`."""
    digest = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:16]
    name = f"_ropewalk_task_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise DataError(f"{file}: cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module


class ProcessedRows(list[dict[str, Any]]):
    """Rows with the methods that `process_docs` functions use of `datasets.Dataset`."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else []

    @property
    def features(self) -> dict[str, Any]:
        return dict.fromkeys(self.column_names)

    def map(
        self,
        function: Callable[..., Any],
        *,
        with_indices: bool = False,
        remove_columns: Sequence[str] = (),
        **_: Any,
    ) -> ProcessedRows:
        """Each row with the fields that `function` returns; options of caching and processes have no effect."""
        rows = []
        for index, row in enumerate(self):
            made = (function(dict(row), index) if with_indices else function(dict(row))) or {}
            gone = {remove_columns} if isinstance(remove_columns, str) else {*remove_columns}
            rows.append({**{key: value for key, value in row.items() if key not in gone}, **made})
        return ProcessedRows(rows)

    def filter(self, function: Callable[..., Any], *, with_indices: bool = False, **_: Any) -> ProcessedRows:
        """The rows for which `function` is true."""
        return ProcessedRows(r for i, r in enumerate(self) if (function(r, i) if with_indices else function(r)))

    def select(self, indices: Sequence[int], **_: Any) -> ProcessedRows:
        """The rows at `indices`."""
        return ProcessedRows(self[index] for index in indices)

    def rename_column(self, old: str, new: str) -> ProcessedRows:
        """The rows with a column renamed."""
        return ProcessedRows({new if key == old else key: value for key, value in row.items()} for row in self)

    def remove_columns(self, names: str | Sequence[str]) -> ProcessedRows:
        """The rows without some columns."""
        gone = {names} if isinstance(names, str) else {*names}
        return ProcessedRows({key: value for key, value in row.items() if key not in gone} for row in self)

    def to_list(self) -> list[dict[str, Any]]:
        """The rows."""
        return list(self)
