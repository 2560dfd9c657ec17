"""What the pages say can be done: every command as written, every block of code, every link.

A page's blocks are run in order in a folder of their own (`Workshop`), the command line in this process. Nothing is
added to a command but fewer steps (`Workshop.shortened`); what is not run at all is argued in `NOT_RUN` or, for a
command in a block of text, in a comment above the block: `<!-- not run: it needs a GPU -->`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

from ropewalk import __version__
from ropewalk.base.errors import ConfigError
from ropewalk.cli.main import VERBS, app, main
from ropewalk.config.read import parse
from ropewalk.flow.recipe import Recipe
from ropewalk.flow.reference import recipe_page
from ropewalk.flow.run_or_recipe import resolve_recipe
from ropewalk.flow.verbs import quickstart_recipe
from ropewalk.train.config import Train
from tests.evaluate.code_examples import PROBLEMS, write_problems
from tests.evaluate.human.studies import by_system, fill
from tests.evaluate.sandbox.isolations import any_isolation
from tests.foreign_corpora import write_megatron

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
LONGEST = 60
"""Steps that a run may have as it is."""
SHARES = (250, 100, 50, 25, 10, 5, 3, 2)
"""A longer run keeps one step in so many: in the first of these with which its ramps and its warm-up still end."""
HISTORY = ("CHANGELOG", "log")
"""Pages that may name what is gone."""
TRAINING_VERBS = ("quickstart", "run", "prepare", "train", "evaluate", "doctor", "profile", "chaos")
"""Verbs that are given fewer steps; the others of a run must agree with `train` about them."""
NOT_RUN = {
    r"python -m venv \.venv": "it makes the environment that the tests run in",
    r"\. \.venv/bin/activate": "it is the shell's; the tests run in that environment",
    r"make .+": "targets install packages from PyPI; `make -n` and the names of benchmarks are checked",
    r"pip install .+": "it would change the environment of the tests; extras, files and wheel are looked up, and "
    "tests/test_packaging.py installs the wheel",
    r"\S*python -m pytest .+": "the tests would run themselves; files and folders must exist",
}
"""What is checked but not run, and why."""
WORDS_NOT_RUN = {"make": "make", "pip": "pip", ".": ".", "venv": "python -m venv", "pytest": "pytest"}
"""How the page itself names them, in a comment."""
SLOW = {
    "README.md": "docs/start.md has the same commands",
    "README.zh-CN.md": "a test says that it has the commands of README.md",
    "docs/guides/evaluation-metrics.md": "an evaluation with 20 completions, a quarter of a minute",
    "docs/guides/clusters.md": "several processes, half a minute",
    "docs/guides/parallel.md": "several processes, most of a minute",
    "docs/guides/runs.md": "eight runs, half a minute",
    "docs/guides/speed.md": "profiles; tests/cli/test_profile.py has quick ones",
}
"""Pages that only `make test-slow` runs, and why."""
SLOW_VERBS = ("code", "run", "train", "evaluate", "doctor", "profile", "bench", "chaos")
"""Verbs whose examples only `make test-slow` runs: they train, as pages do that `make test` runs."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    fences = re.finditer(r"^```([\w-]+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    found = [Block(found[1], found[2], text[: found.start()].count("\n") + 2) for found in fences]
    assert text.count("\n```") == 2 * len(found), f"{page}: every block names its language"
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def has_commands(page: Path) -> bool:
    return any(block.language in ("bash", "python") for block in blocks_of(page))


def leaves(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb and subcommand that does something, with its words."""
    command = command or typer.main.get_command(app)
    names = getattr(command, "list_commands", lambda _: [])(None)
    if not names:
        yield path, command
    for name in names:
        yield from leaves(command.get_command(None, name), (*path, name))


def words_of_help() -> list[str]:
    groups = {path[:-1] for path, _ in leaves()}
    return sorted(" ".join(path) for path in {*(path for path, _ in leaves()), *groups})


def examples() -> list[str]:
    texts = [(command.help or "") for _, command in leaves()]
    texts += [(typer.main.get_command(app).get_command(None, verb).help or "") for verb in VERBS]
    found = [line for text in texts for line in re.findall(r"^\s*Example: (.+)$", text, flags=re.MULTILINE)]
    return sorted(set(found))


class Workshop:
    """A folder with the files that the pages mention."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "page"}
        """What the Python blocks of a page have defined."""

    def furnish(self) -> None:
        """Small corpora from Python's own documentation and sources, recipes, a finished quickstart and its export."""
        for place in ("my-texts", "my-books", "data"):
            for name in [name for name in sorted(topics) if 300 < len(topics[name]) < 6000]:
                self._write(f"{place}/{name}.txt", topics[name])
        self._write("my-books/a.txt", topics["assert"] + topics["lambda"])
        self._write("my-book.txt", "\n\n".join(topics.values()))
        self._write(
            "my-chinese.jsonl", "".join(f'{{"text": "其{number}：春眠不覺曉，處處聞啼鳥。"}}\n' for number in range(99))
        )
        for module in ("bisect", "colorsys", "fnmatch", "heapq", "keyword", "linecache", "reprlib", "token"):
            self._write(f"my-code/{module}.py", (Path(os.__file__).parent / f"{module}.py").read_text("utf-8"))
        for number in range(8):
            self._picture(f"photos/{number}.jpg", number)
        self._write("my-dialogues.jsonl", "".join(dialogue(name) for name in sorted(topics)))
        self._write("questions.txt", "What is a rope?\nAnd a strand?\n")
        for recipe in RECIPES:
            self._write(f"recipes/{recipe.name}", recipe.read_text("utf-8"))
        for page in PAGES:
            self._write(name_of(page), page.read_text("utf-8"))
        for name, line in {
            "ref.txt": "The rope is laid of three strands.",
            "out.txt": "A rope is laid of strands.",
        }.items():
            self._write(name, f"{line}\n" * 3)
        write_problems(self.folder / "problems.jsonl")
        samples = [{"task_id": one["task_id"], "completion": one["canonical_solution"]} for one in PROBLEMS]
        self._write("samples.jsonl", "".join(json.dumps(one) + "\n" for one in samples * 2))
        for name in ("books", "a", "b"):
            source = f'name = "{name}"\n[[prepare.sources]]\nname = "{name}"\npaths = ["my-books/"]\n'
            self._write(f"recipes/{name}.toml", source)
        self.command("ropewalk quickstart prepare.workers=1")  # worker processes would take as long to start
        shutil.copytree(self.folder / "runs/quickstart", self.folder / "runs/other-seed")
        shutil.rmtree(self.folder / "prepared" / "stages")  # 34 MB that no page needs
        self.command("ropewalk prepare recipes/books.toml")
        self.command("ropewalk model export runs/quickstart my-llama")
        self.command("ropewalk human export runs/quickstart --out my-sheets --items 40 --raters 2")
        for rater in ("r1", "r2"):
            fill(self.folder / "my-sheets", rater, by_system)
        self.command("ropewalk human import my-sheets my-sheets/filled-r1.csv my-sheets/filled-r2.csv")
        write_megatron(self.folder / "corpus/my_text_document", [[*range(1, 200), 0] for _ in range(40)])

    def _picture(self, name: str, number: int) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(self.folder / name)

    def run(self, block: Block) -> str:
        """Does what one block asks for; its output."""
        if block.language == "bash":
            lines = block.text.replace("\\\n", " ").splitlines()
            return "".join(self.command(line) for line in lines if shlex.split(line, comments=True))
        if block.language == "yaml":
            self._write(re.match(r"# (\S+\.yaml)\n", block.text)[1], block.text)
            return ""
        if block.language == "python" and (named := re.match(r"# (\S+\.py)\n", block.text)):
            self._write(named[1], block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, "page", "exec"), self.names)
            return output.getvalue()
        if block.language == "toml" and (named := re.match(r"# (\S+\.toml)\n", block.text)):
            self._write(named[1], block.text)
        return ""

    def command(self, line: str) -> str:
        """Runs one line as the page gives it; fails when its exit status is not what the page says."""
        words = shlex.split(line, comments=True)
        stated = re.search(r"# exit status (\d+)$", line)
        if words[0] == "ropewalk":
            status, output = self._ropewalk(words[1:])
            assert status == int(stated[1] if stated else 0), f"{line}\nexit status {status}\n{output}"
            return output
        assert any(re.fullmatch(known, shlex.join(words)) for known in NOT_RUN), f"`{line}`: teach {__file__} to run it"
        if words[0] == "make":
            dry_run(words[1])
            benchmarks = [word.removeprefix("NAME=") for word in words[2:] if word.startswith("NAME=")]
            assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in benchmarks), f"{line}: no such script"
        if words[:2] == ["pip", "install"]:
            check_pip(words[2:])
        if words[1:3] == ["-m", "pytest"]:
            assert all((ROOT / path).exists() for path in words[3:]), f"{line}: no such tests"
        return ""

    def _ropewalk(self, words: list[str]) -> tuple[int, str]:
        target = None
        if ">" in words:
            words, target = words[: words.index(">")], words[words.index(">") + 1]
        typed = ""
        if "<" in words:
            words, typed = words[: words.index("<")], (self.folder / words[words.index("<") + 1]).read_text("utf-8")
        output, errors = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            contextlib.chdir(self.folder),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "stdin", io.StringIO(typed))
            try:
                main([*words, *shortened(words)])
                status = 0
            except SystemExit as ended:
                status = int(ended.code or 0)
        if target:
            self._write(target, output.getvalue())
        if "--detach" in words and status == 0:
            os.waitpid(int(re.search(r"pid\s+(\d+)", output.getvalue())[1]), 0)
        return status, output.getvalue() + errors.getvalue()

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def dialogue(topic: str) -> str:
    """A question about a topic and its answer, as a line of JSON."""
    turns = [("user", f"What is {topic}? Tell me in some detail, please."), ("assistant", topics[topic][:1500])]
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n"


def shortened(words: list[str]) -> list[str]:
    """The settings that make the training that a command asks for short: fewer steps, nothing else."""
    settings = [word for word in words[1:] if re.match(r"[\w.]+=", word)]
    recipes = [word for word in words[1:] if word.endswith(".toml") and "=" not in word]
    if words[0] not in TRAINING_VERBS:
        return []
    if words[0] != "quickstart" and not recipes:  # a run, whose steps are few unless the command asks for more
        asked = [int(word.split("=")[1]) for word in settings if word.startswith("train.steps=")]
        # A run goes on with more steps than it has: some more than those of a recipe that is not shortened.
        return [f"train.steps={max(2, steps // SHARES[0])}" for steps in asked if steps > 2 * LONGEST]
    for share in SHARES:
        try:
            train = recipe_of(recipes, settings).train
            fewer = fewer_steps(train, share)
            recipe_of(recipes, [*settings, *fewer])
        except ConfigError:
            continue  # the recipe itself is wrong, or it needs more steps than that
        return fewer
    return []


def recipe_of(recipes: list[str], settings: list[str]) -> Recipe:
    return (resolve_recipe(recipes[0], settings) if recipes else quickstart_recipe(settings)).value


def fewer_steps(train: Train, share: int) -> list[str]:
    if train.total_steps <= LONGEST:
        return []
    if train.phases:
        return [f"train.phases.{index}.steps={max(2, one.steps // share)}" for index, one in enumerate(train.phases)]
    return [f"train.steps={max(2, train.total_steps // share)}"]


@functools.cache
def dry_run(target: str) -> None:
    done = subprocess.run(["make", "-n", target, "NAME=step"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"make {target}\n{done.stdout}{done.stderr}"


def check_pip(words: list[str]) -> None:
    """Whether what is installed is this clone or its wheel, with extras that exist, under constraints that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    *target, constrain, file = words
    wheel = f"dist/ropewalk-{__version__}-py3-none-any.whl"
    asked = re.fullmatch(rf"(-e \.|{re.escape(wheel)})\[([\w,]+)\]", " ".join(target))
    assert asked
    assert constrain == "-c"
    assert set(asked[2].split(",")) <= set(extras)
    assert (ROOT / file).exists()


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("furnished")
    Workshop(folder).furnish()
    return folder


def copy_or_link(source: str, target: str) -> None:
    """Shards are never written again, so that one copy does for all workshops."""
    if source.endswith(".tokens"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


@pytest.fixture
def workshop(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    folder = tmp_path / "workshop"
    shutil.copytree(furnished, folder, copy_function=copy_or_link)
    monkeypatch.chdir(folder)
    return Workshop(folder)


def not_run(page: Path) -> set[str]:
    """What a page has of `NOT_RUN`, by the words of `WORDS_NOT_RUN`."""
    texts = [block.text.replace("\\\n", " ") for block in blocks_of(page) if block.language == "bash"]
    lines = [line for text in texts for line in text.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    found = [words[2] if words[1:2] == ["-m"] else words[0] for words in commands if words]
    return {WORDS_NOT_RUN[word] for word in found if word in WORDS_NOT_RUN}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_lists_what_of_its_commands_is_not_run(page: Path) -> None:
    listed = re.search(r"<!-- The tests do not run (.+?):", page.read_text("utf-8"))
    assert {*re.findall(r"`([^`]+)`", listed[1])} == not_run(page) if listed else not not_run(page)


def slow_if(slow: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * slow


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=slow_if(name_of(page) in SLOW))
        for page in PAGES
        if has_commands(page)
    ],
)
def test_the_commands_of_a_page_work(page: Path, workshop: Workshop) -> None:
    skip_without_sandbox("".join(block.text for block in blocks_of(page)))
    output = ""
    before: Block | None = None
    for block in blocks_of(page):
        if block.language == "text" and before and "# exit status" in before.text:
            assert block.text in output, f"{name_of(page)}:{block.line}: not in the output, which is\n{output}"
        output = workshop.run(block)
        before = block


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one, marks=slow_if(one.split()[1] in SLOW_VERBS)) for one in examples()],
)
def test_the_example_of_a_verb_works(example: str, workshop: Workshop) -> None:
    skip_without_sandbox(example)
    workshop.command(example)


def skip_without_sandbox(commands: str) -> None:
    """Containers may forbid the namespaces that generated code runs in."""
    if "ropewalk code" in commands:
        any_isolation()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_of_toml_is_part_of_a_recipe_or_a_file_that_the_page_uses(page: Path) -> None:
    commands = "".join(block.text for block in blocks_of(page) if block.language == "bash")
    for block in (block for block in blocks_of(page) if block.language == "toml"):
        named = re.match(r"# (\S+\.toml)\n", block.text)
        if named:
            assert named[1] in commands, f"{name_of(page)}:{block.line}: no command uses {named[1]}"
            continue
        sources = "" if "[[prepare.sources]]" in block.text else '[[prepare.sources]]\nname = "a"\npaths = ["a"]\n'
        name = "" if re.match("name = ", block.text) else 'name = "page"\n'
        parse(Recipe, f"{name}{block.text}{sources}", f"{name_of(page)}:{block.line}")


def test_pages_that_are_slow_exist() -> None:
    assert set(SLOW) <= {name_of(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_command_in_a_block_of_text_says_why_it_is_not_run(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    for block in blocks_of(page):
        assert block.language in ("bash", "python", "toml", "json", "yaml", "text"), f"{name_of(page)}:{block.line}"
        if block.language == "text" and re.search(r"^(\$ |\S*python |ropewalk |make |pip )", block.text, re.MULTILINE):
            above = lines[block.line - 3]
            assert re.fullmatch(r"<!-- not run: \S.+ -->", above), f"{name_of(page)}:{block.line}: {above!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in HISTORY], ids=name_of)
def test_a_command_in_a_sentence_has_a_verb_and_options_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`ropewalk ([^`]+)`", text):
        words = line.split()
        command = typer.main.get_command(app)
        while words and words[0] in getattr(command, "list_commands", lambda _: [])(None):
            command = command.get_command(None, words.pop(0))
        if words and words[0] in ("VERB", "--version", "--help"):
            continue
        assert command.name != "ropewalk", f"{name_of(page)}: no verb in `ropewalk {line}`"
        inner = getattr(command, "commands", {}).values()
        options = {option for one in (command, *inner) for param in one.params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= options | {"--help"}, f"{name_of(page)}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text("utf-8"))
    relative = [link for link in links if not re.match(r"\w+:", link)]
    assert [link for link in relative if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_that_is_named_as_proof_exists(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text("utf-8"))
    missing = [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text("utf-8")]
    assert missing == []


def test_the_recipe_reference_is_the_generated_one() -> None:
    written = (ROOT / "docs" / "reference" / "recipe.md").read_text("utf-8")
    assert written == recipe_page(), "docs/reference/recipe.md is not up to date: run `make docs`"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_lists_every_verb(page: str) -> None:
    listed = re.findall(r"^\| `ropewalk (\w+)`", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE)
    assert listed == list(VERBS)


def test_both_readmes_have_the_same_commands_and_proofs() -> None:
    pages = (ROOT / "README.md", ROOT / "README.zh-CN.md")
    commands = [[block.text for block in blocks_of(page)] for page in pages]
    proofs = [re.findall(r"`(tests/[^`]+)`", page.read_text("utf-8")) for page in pages]
    assert commands[0] == commands[1]
    assert proofs[0] == proofs[1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_named_as_its_file_and_can_be_shown(recipe: Path, workshop: Workshop) -> None:
    assert parse(Recipe, recipe.read_text("utf-8"), recipe.name).value.name == recipe.stem
    workshop.command(f"ropewalk recipe show recipes/{recipe.name}")
    workshop.command(f"ropewalk recipe check recipes/{recipe.name}")
    workshop.command(f"ropewalk model describe recipes/{recipe.name}")


ASK_FOR_HELP = """
import json, os, sys
from ropewalk.cli.main import main

def ask(words):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        status = 1
        try:
            main([*words.split(), "--help"])
        except SystemExit as ended:
            status = ended.code or 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    return {"status": status, "text": text, "seconds": start + usage.ru_utime + usage.ru_stime}

start = sum(os.times()[:2])
json.dump({words: ask(words) for words in sys.argv[1:]}, sys.stdout)
"""
"""Starts Python and the command line once, then forks for each command: the CPU seconds of both are the command's."""


def ask_for_help(commands: list[str]) -> dict[str, dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", ASK_FOR_HELP, *commands], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    return ask_for_help(words_of_help())


@pytest.mark.parametrize("words", words_of_help(), ids=lambda words: words or "ropewalk")
def test_help_comes_quickly_with_one_line_of_description_and_an_example(
    words: str, answers: dict[str, dict[str, Any]]
) -> None:
    answer = answers[words]
    assert answer["status"] == 0
    # We promise 0.3 s; twice that is what a busy machine may take, and far less than an import of torch.
    seconds = [answer["seconds"]]
    while min(seconds) >= 0.6 and len(seconds) < 3:
        seconds.append(ask_for_help([words])[words]["seconds"])
    assert min(seconds) < 0.6
    usage_lines, summary, example, *_ = (paragraph.strip() for paragraph in answer["text"].strip().split("\n\n"))
    assert usage_lines.startswith("Usage:")
    assert summary.endswith(".")
    assert "\n" not in summary
    assert example.startswith("Example: ropewalk")


def test_every_verb_speaks_json() -> None:
    silent = [path for path, command in leaves() if not any("--json" in p.opts for p in command.params)]
    assert silent == []
