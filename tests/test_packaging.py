"""What is installed: the wheel and the source distribution hold what they must, and work outside of the clone.

The environments here are empty but for the wheel and the packages that its metadata ask for. Those come from the
environment of the tests by links, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from packaging.requirements import Requirement

from ropewalk import __version__
from ropewalk.base.errors import MissingPackage

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGES = (ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "docs" / "start.md", ROOT / "docs" / "install.md")
WHEEL = f"ropewalk-{__version__}-py3-none-any.whl"


def test_the_table_of_extras_has_every_extra_and_its_packages() -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", page, flags=re.MULTILINE))
    extras = {
        name: ", ".join(Requirement(one).name for one in packages)
        for name, packages in PROJECT["optional-dependencies"].items()
    }
    extras["dev"] = "see `pyproject.toml`"
    assert rows == extras


def test_every_place_names_the_python_versions_that_are_declared() -> None:
    declared = sorted(re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"])))
    assert declared == ["3.11", "3.12"]
    assert PROJECT["requires-python"] == ">=3.11,<3.13"
    assert "(3, 11) <= sys.version_info < (3, 13)" in (ROOT / "Makefile").read_text("utf-8")
    for page in PAGES:
        text = page.read_text("utf-8")
        assert re.search(r"Python 3\.11( or |\s或\s)3\.12", text), page.name
        assert not re.search(r"3\.11 (to|至)", text), page.name


def test_in_a_clone_a_missing_package_is_installed_with_the_tested_versions() -> None:
    assert "pip install -e '.[train]' -c constraints.txt" in str(MissingPackage("torch", "this", "train"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source distribution and of the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], folder)
    return folder


def run(command: list[str], folder: Path, status: int = 0) -> str:
    """Output of a command that is given in `folder`, where no file of the clone can be imported by accident."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions that meet `requirements`, with all that those need, as installed here."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        known = requirement.name in found
        found[requirement.name] = one = distribution(requirement.name)
        for wanted in requirement.extras if known else {"", *requirement.extras}:
            waiting += [(Requirement(text), wanted) for text in one.requires or ()]
    return found


def environment(folder: Path, wheel: Path, requirements: Iterable[str]) -> Path:
    """A new environment with the wheel and what `requirements` ask for, and nothing else; its Python."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], ROOT)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for one in closure(requirements).values():
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(one.locate_file(top))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--no-index", str(wheel)], folder)
    return python


@pytest.fixture(scope="module")
def core(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("core") / "env", built / WHEEL, PROJECT["dependencies"])


@pytest.fixture(scope="module")
def trainer(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]]
    return environment(tmp_path_factory.mktemp("trainer") / "env", built / WHEEL, asked)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_no_other(built: Path) -> None:
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ropewalk").rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name and not name.endswith((".nbi", ".nbc"))}
    with zipfile.ZipFile(built / WHEEL) as archive:
        held = set(archive.namelist())
        facts = archive.read(f"ropewalk-{__version__}.dist-info/METADATA").decode()
    assert {name for name in held if ".dist-info/" not in name} == ours
    assert {"ropewalk/py.typed", "ropewalk/flow/quickstart.toml", "ropewalk/monitor/report/page.css"} <= held
    assert f"ropewalk-{__version__}.dist-info/licenses/LICENSE" in held
    assert f"\nVersion: {__version__}\n" in facts
    assert "\nRequires-Python: <3.13,>=3.11\n" in facts


@pytest.mark.slow
def test_the_source_distribution_is_a_clone(built: Path) -> None:
    with tarfile.open(built / f"ropewalk-{__version__}.tar.gz") as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames()}
    needed = ["Makefile", "constraints.txt", "LICENSE", "recipes/tiny-cpu.toml", "mkdocs.yml", "docs/site.css"]
    needed += [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")]
    assert [name for name in needed if name not in held] == []
    assert [name for name in held if name.startswith((".venv", "runs", "prepared", "site/", "dist"))] == []


@pytest.mark.slow
def test_without_extras_everything_that_does_not_train_works(core: Path, tmp_path: Path) -> None:
    ropewalk = str(core.parent / "ropewalk")
    for name in sorted(topics)[:60]:
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.txt").write_text(topics[name], "utf-8")
    assert run([ropewalk, "--version"], tmp_path).strip() == __version__
    assert "quickstart" in run([ropewalk, "--help"], tmp_path)
    run([str(core), "-c", "import importlib.util as u; assert not u.find_spec('torch')"], tmp_path)
    run([ropewalk, "new", "mine.toml", "texts/"], tmp_path)
    for words in ("recipe check mine.toml", "recipe show mine.toml", "prepare mine.toml", "prepare report mine.toml"):
        run([ropewalk, *words.split()], tmp_path)
    for words in ("plan mine.toml", "plan draw mine.toml --ranks 2 --microbatches 4", "model describe mine.toml"):
        run([ropewalk, *words.split()], tmp_path)
    run([ropewalk, "launch", "slurm", "mine.toml", "--nodes", "2", "--gpus-per-node", "8"], tmp_path)
    told = run([ropewalk, "train", "mine.toml"], tmp_path, status=2)
    assert "training needs the package `torch`; install it with: pip install 'ropewalk[train]'" in told


@pytest.mark.slow
def test_the_quickstart_runs_from_the_wheel(trainer: Path, tmp_path: Path) -> None:
    run([str(trainer.parent / "ropewalk"), "quickstart", "train.steps=3"], tmp_path)
    assert "<style>" in (tmp_path / "runs" / "quickstart" / "report.html").read_text("utf-8")
    where = run([str(trainer), "-c", "import ropewalk; print(ropewalk.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(trainer.parents[1])


def test_make_test_gpu_runs_every_test_that_is_marked_and_says_what_an_environment_lacks() -> None:
    # What an outer `make test` hands down would add its own lines.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    asked = ["make", "--no-print-directory", "-n", "test-gpu", "GPU_PYTHON=python3"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, env=environment)
    command = told.stdout.splitlines()[-1]
    marked = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()}
    marked.discard(str(Path(__file__).relative_to(ROOT)))
    assert set(command.partition("-m gpu ")[2].split()) == marked
    lacking = subprocess.run(
        ["make", "test-gpu", f"GPU_PYTHON={sys.executable}", "GPU_NEEDS=pytest unheard_of"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert lacking.returncode == 2
    assert f"make test-gpu: {sys.executable} lacks unheard_of" in lacking.stderr
