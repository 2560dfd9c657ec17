"""What we ask of every file, read from the sources: direction, torch-free parts, sizes, who may do what."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ropewalk.cli.main import VERBS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ropewalk"
# A folder imports only folders that stand before it.
ORDER = (
    *("base", "config", "store", "prepare", "load", "model", "plan", "parallel", "checkpoint", "evaluate"),
    *("train", "privacy", "launch", "monitor", "flow", "cli"),
)
MODULES = sorted(PACKAGE.rglob("*.py"))
# The folders from the model to the command line, in which every name is for one thing.
TRAINING_HALF = ("model", "plan", "parallel", "checkpoint", "evaluate", "train", "launch", "monitor", "flow", "cli")
SAME_ROLE = {
    "__init__": "makes a folder a package",
    "__main__": "what `python -m` runs",
    "config": "the settings of a folder",
}
"""Names of modules that several folders share, and why."""
SAME_ROLE_ELSEWHERE = {
    "disk": "storage on a local disk: of checkpoints, of cached items",
    "forecast": "what a run will need: memory, or speed by what prepares its data",
    "horovod": "Horovod's environment and its API",
    "importance": "the two ends of importance sampling: losses, and the sampler that draws by them",
    "order": "an order that is fixed: of hooks, of sequences",
    "processes": "starts worker processes",
    "simulate": "a simulation: of a pipeline schedule, of a cache",
    "state": "what changes from step to step: of training, of the corpus",
    "strict": "reads values of strangers strictly",
    "summary": "one object with the results of a run, of prepared data",
    "trace": "follows something back: the time of a step, a token",
    "wire": "a protocol between nodes",
    "worker": "a worker process",
}
"""Names of modules that the training half shares with other folders, and the role that is the same."""
NOT_YET_DISTINCT = frozenset(("fused", "layout", "network", "pipeline", "placement", "positions", "shards"))
"""Names that still stand for another idea in `base`, `config`, `store`, `prepare` or `load`: no more may come."""
TORCH_FREE_FOLDERS = ("base", "config", "store", "prepare", "plan", "launch", "monitor", "flow", "cli")
TORCH_FREE_FILES = (
    *("model/spec.py", "model/components.py", "model/trainable.py", "model/activations.py", "train/optim/table.py"),
    *("load/order.py", "load/history.py", "evaluate/metrics/metric_table.py", "evaluate/judges/judge_table.py"),
    *("load/media/decode.py", "load/media/resample.py", "load/media/samples.py", "load/media/transforms.py"),
)


# Kernels of a GPU, imported when a recipe asks for one.
TORCH_WITHIN = "prepare/gpu/"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def within(path: Path) -> str:
    """The file as people name it: `train/loop.py`."""
    return path.relative_to(PACKAGE).as_posix()


def folder_of(path: Path) -> str:
    return within(path).split("/")[0]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every name that a file imports, anywhere in it, as `module.name`, with its line; lazy targets too."""
    return list(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parent.parts
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"ropewalk(\.\w+)*:\w+", str(node.value)):
            yield str(node.value).replace(":", "."), node.lineno


def edges() -> Iterator[tuple[str, str, str]]:
    """(folder, folder it imports, `file:line imports name`) for every import between two folders."""
    for path in MODULES:
        here = folder_of(path)
        for name, line in imports_of(path):
            package, there, *_ = [*name.split("."), ""]
            if package == "ropewalk" and there in ORDER and here in ORDER and there != here:
                yield here, there, f"{within(path)}:{line} imports {name}"


def calls_of(path: Path) -> Iterator[tuple[str, int]]:
    """The dotted name of everything that a file calls."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def names_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every name and attribute that a file's code mentions, but for those it only puts items into."""
    nodes = list(ast.walk(tree_of(path)))
    filled = {id(n.value) for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in filled:
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.alias):
            yield node.name, node.lineno


def test_a_folder_imports_only_folders_above_it() -> None:
    assert [text for here, there, text in edges() if ORDER.index(there) > ORDER.index(here)] == []


@functools.cache
def defined_in(module: str) -> frozenset[str]:
    """Every name that a module of ours assigns, defines or imports, and the modules inside a package."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return frozenset()
    names = {each.stem for each in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return frozenset(names)


def test_names_imported_from_us_exist() -> None:
    """Also those that only a GPU or a benchmark would ask for, which nothing else here imports."""
    wrong = []
    for path in (*MODULES, *(p for folder in ("tests", "benchmarks") for p in sorted((ROOT / folder).rglob("*.py")))):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ImportFrom):
                continue
            above = path.relative_to(ROOT).parent.parts[: 1 - node.level or None] if node.level else ()
            module = ".".join((*above, node.module) if node.module else above)
            if module.split(".")[0] == "ropewalk" and not all(n.name in defined_in(module) for n in node.names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: from {module}")
    assert wrong == []


def test_launch_and_monitor_stand_apart() -> None:
    apart = ("launch", "monitor")
    reach_out = [text for here, there, text in edges() if here in apart and there not in ("base", "config")]
    reach_in = [text for here, there, text in edges() if there in apart and here not in ("flow", "cli")]
    assert reach_out + reach_in == []


def test_private_names_stay_in_their_folder() -> None:
    assert [text for _, _, text in edges() if re.search(r"\._(?!_)", text)] == []


def test_folders_form_no_cycle() -> None:
    below = {(here, there) for here, there, _ in edges()}
    reached = set(below)
    for middle in ORDER:
        reached |= {(a, d) for a, b in reached if b == middle for c, d in reached if c == middle}
    assert [folder for folder in ORDER if (folder, folder) in reached] == []


def test_every_folder_is_in_the_list_and_every_init_is_small() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(ORDER) == set()
    assert [within(path) for path in PACKAGE.glob("*/__init__.py") if len(path.read_text().splitlines()) > 100] == []


def shared(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that stand for several places, from pairs of name and place."""
    places: dict[str, list[str]] = {}
    for name, place in names:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_modules_of_the_training_half_share_a_name() -> None:
    half = [path for path in MODULES if folder_of(path) in TRAINING_HALF and path.stem not in SAME_ROLE]
    # `cli/VERB.py` bears the name of its verb.
    verbs = {path for path in half if folder_of(path) == "cli" and path.stem in VERBS}
    # A kernel bears the name of the module whose plain code it replaces.
    kernels = {path for path in half if path.parent.name == "kernels"}
    assert shared((path.stem, within(path)) for path in half if path not in verbs | kernels) == {}
    assert shared((path.stem, within(path)) for path in kernels) == {}


def test_a_file_name_occurs_in_two_folders_only_for_the_same_role() -> None:
    def names(*, half: bool) -> set[str]:
        files = (path for path in MODULES if (folder_of(path) in TRAINING_HALF) == half)
        return {path.stem for path in files if path.parent.name != "kernels" and folder_of(path) != "cli"}

    both = names(half=True) & names(half=False) - SAME_ROLE.keys()
    assert both - SAME_ROLE_ELSEWHERE.keys() == NOT_YET_DISTINCT
    assert SAME_ROLE_ELSEWHERE.keys() - both == set(), "an exception that is not needed"


def test_no_two_public_classes_of_the_training_half_share_a_name() -> None:
    classes = [
        (node.name, within(path))
        for path in MODULES
        if folder_of(path) in TRAINING_HALF
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert shared(classes) == {}


IMPORT_ALL_WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is imported")

sys.meta_path.insert(0, NoTorch())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print("\\n".join(failed))
"""


def test_the_torch_free_part_imports_without_torch() -> None:
    free = [
        path
        for path in MODULES
        if folder_of(path) in TORCH_FREE_FOLDERS or path.name == "config.py" or within(path) in TORCH_FREE_FILES
        if not within(path).startswith(TORCH_WITHIN)
    ]
    names = [module_of(path) for path in free if path.name != "__main__.py"]
    command = [sys.executable, "-c", IMPORT_ALL_WITHOUT_TORCH, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [""]


@pytest.mark.parametrize("folder", ["ropewalk", "tests"])
def test_no_file_has_more_than_600_lines(folder: str) -> None:
    sizes = {path: len(path.read_text("utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 600} == {}


def found(pattern: str, *, outside: tuple[str, ...], inside: str = "", calls: bool = False) -> list[str]:
    """Where a name that matches is used in `inside`, except in the files and folders of `outside`."""
    return [
        f"{within(path)}:{line} {name}"
        for path in MODULES
        if within(path).startswith(inside) and not within(path).startswith(outside)
        for name, line in (calls_of(path) if calls else names_of(path))
        if re.fullmatch(pattern, name)
    ]


def test_only_config_and_launch_read_the_environment() -> None:
    assert found(r"(os\.)?(environb?|getenvb?)", outside=("config/", "launch/")) == []


def test_only_the_command_line_prints() -> None:
    allowed = ("cli/", "train/__main__.py", "flow/reference.py")
    assert found("print", outside=allowed, calls=True) == []


def test_nothing_is_pickled() -> None:
    # What a process tells the workers that it started itself comes from no file and from nobody else.
    own_workers = ("load/media/team.py",)
    assert found(r"pickle(\..*)?|torch\.(load|save)|np\.load|numpy\.load", outside=own_workers) == []


def test_process_groups_are_made_in_one_file_and_used_in_another() -> None:
    groups = r"(.*\.)?(new_group|new_subgroups|init_device_mesh|init_process_group)"
    words = r"((all_|reduce|broadcast|gather|scatter|barrier|batch_isend)\w*|i?send|i?recv)"
    collectives = rf"(dist|distributed|torch\.distributed)\.{words}"
    assert found(groups, inside="parallel/", outside=("parallel/mesh.py",)) == []
    assert found(collectives, inside="parallel/", outside=("parallel/comm.py",), calls=True) == []


def test_models_know_nothing_of_distribution() -> None:
    imported = [(within(path), name) for path in MODULES if folder_of(path) == "model" for name, _ in imports_of(path)]
    assert [(file, name) for file, name in imported if name.startswith("torch.distributed")] == []
    assert found(r"torch\.distributed(\..*)?", inside="model/", outside=("nowhere",)) == []


def test_only_models_know_a_kind_of_model() -> None:
    """The others build stages by the spec (`model/protocol.py`)."""
    imports = [(within(path), name) for path in MODULES if folder_of(path) != "model" for name, _ in imports_of(path)]
    assert [(file, name) for file, name in imports if name.startswith("ropewalk.model.decoder")] == []


MACHINE_PATHS = re.compile(r"(?<![\w.])/" + r"(work|tmp|home|root|mnt|scratch)/")
TEXTS = ("*.py", "*.md", "*.toml", "*.js", "*.css", "*.txt")


def test_no_page_or_source_names_a_path_of_one_machine() -> None:
    folders = [ROOT / name for name in ("ropewalk", "docs", "recipes", "examples", "benchmarks", "tests")]
    files = [path for folder in folders for ending in TEXTS for path in folder.rglob(ending)]
    files += [path for ending in TEXTS for path in ROOT.glob(ending)] + [ROOT / "Makefile"]
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert hits == []
