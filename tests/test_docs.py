"""What the pages say can be done: every command, every block of code, every link.

A page's blocks are run in order in a folder of their own (`Workshop`), the command line in this process. Verbs
that train get settings that make it a matter of seconds; settings on the page win over them.
"""

from __future__ import annotations

import contextlib
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

from ropewalk.cli.main import VERBS, app, main
from ropewalk.config.read import parse
from ropewalk.flow.recipe import Recipe
from ropewalk.flow.reference import recipe_page
from tests.foreign_corpora import write_megatron

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
TINY = [
    *("train.steps=4", "train.batch_rows=2", "train.schedule.warmup_steps=1"),
    *("model.layers=1", "model.width=32", "model.heads=2", "load.sequence_length=64"),
    *("prepare.tokenizer.vocabulary=300", "prepare.filter.min_bytes=50", "prepare.workers=1"),
    *("evaluate.samples=2", "evaluate.max_bytes=60000", "evaluate.prompt_tokens=16", "evaluate.new_tokens=16"),
]
QUICK = ['prepare.sources.0.paths=["my-code"]', 'prepare.sources.1.paths=["my-texts"]']
TRAINING_VERBS = ("quickstart", "run", "prepare", "train", "evaluate", "doctor", "profile", "chaos")
UNDERSTOOD = ("python -m venv .venv", ". .venv/bin/activate")
"""Commands of the shell around ropewalk, which need no proof."""
SLOW = (
    # What trains most often: a minute and a half of a core between them.
    "docs/guides/parallel.md",
    "ropewalk chaos recipes/books.toml --quick train.steps=20",
    # Run by docs/guides/speed.md, and with another medium by the next example.
    "ropewalk bench train --size tiny --steps 3",
    "ropewalk doctor data recipes/books.toml",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    fences = re.finditer(r"^```([\w-]+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(found[1], found[2], text[: found.start()].count("\n") + 2) for found in fences]


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
        for module in ("bisect", "colorsys", "fnmatch", "heapq", "keyword", "linecache", "reprlib", "token"):
            self._write(f"my-code/{module}.py", (Path(os.__file__).parent / f"{module}.py").read_text("utf-8"))
        for number in range(8):
            self._picture(f"photos/{number}.jpg", number)
        self._write("my-dialogues.jsonl", "".join(dialogue(name) for name in sorted(topics)))
        for recipe in RECIPES:
            self._write(f"recipes/{recipe.name}", recipe.read_text("utf-8"))
        for page in PAGES:
            self._write(name_of(page), page.read_text("utf-8"))
        for name in ("books", "a", "b"):
            source = f'name = "{name}"\n[[prepare.sources]]\nname = "{name}"\npaths = ["my-books/"]\n'
            self._write(f"recipes/{name}.toml", source)
        self.command("ropewalk quickstart")
        self.command("ropewalk prepare recipes/books.toml")
        self.command("ropewalk model export runs/quickstart my-llama")
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
        if block.language == "python":
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
        if shlex.join(words) in UNDERSTOOD:
            return ""
        if words[0] == "ropewalk":
            status, output = self._ropewalk(words[1:])
            assert status == int(stated[1] if stated else 0), f"{line}\nexit status {status}\n{output}"
            return output
        if words[0] == "make":
            return shell(["make", "-n", *words[1:]])
        if words[:2] == ["pip", "install"]:
            return check_pip(words[2:])
        if words[1:3] == ["-m", "pytest"]:
            assert all((ROOT / path).exists() for path in words[3:]), f"{line}: no such tests"
            return ""
        raise AssertionError(f"`{line}`: teach tests/test_docs.py to run it")

    def _ropewalk(self, words: list[str]) -> tuple[int, str]:
        verb, target = words[0], None
        if ">" in words:
            words, target = words[: words.index(">")], words[words.index(">") + 1]
        if verb in TRAINING_VERBS:
            first = {"quickstart": 1, "explain": 4, "what-if": 3, "report": 3, "prune": 3, "data": 3}.get(
                words[min(1, len(words) - 1)], 2
            )
            first = 1 if verb == "quickstart" else first
            recipe = [word for word in words[1:first] if word.endswith(".toml")]
            words = [*words[:first], *self._tiny(recipe), *(QUICK if verb == "quickstart" else []), *words[first:]]
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), contextlib.chdir(self.folder):
            try:
                main(words)
                status = 0
            except SystemExit as ended:
                status = int(ended.code or 0)
        if target:
            self._write(target, output.getvalue())
        if "--detach" in words and status == 0:
            os.waitpid(int(re.search(r"pid\s+(\d+)", output.getvalue())[1]), 0)
        return status, output.getvalue() + errors.getvalue()

    def _tiny(self, recipe: list[str]) -> list[str]:
        """Settings that make a verb quick; phases have steps of their own."""
        phased = recipe and "[[train.phases]]" in (self.folder / recipe[0]).read_text("utf-8")
        return [setting for setting in TINY if not (phased and setting.startswith("train.steps"))]

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def dialogue(topic: str) -> str:
    """A question about a topic and its answer, as a line of JSON."""
    turns = [("user", f"What is {topic}? Tell me in some detail, please."), ("assistant", topics[topic][:1500])]
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n"


def shell(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def check_pip(words: list[str]) -> str:
    """Whether what is installed is this clone with extras that exist, under constraints that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    editable, target, constrain, file = words
    asked = re.fullmatch(r"\.\[([\w,]+)\]", target)
    assert (editable, constrain) == ("-e", "-c")
    assert asked
    assert set(asked[1].split(",")) <= set(extras)
    assert (ROOT / file).exists()
    return ""


@pytest.fixture(scope="session")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("furnished")
    Workshop(folder).furnish()
    return folder


@pytest.fixture
def workshop(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    folder = tmp_path / "workshop"
    shutil.copytree(furnished, folder)
    monkeypatch.chdir(folder)
    return Workshop(folder)


def quick_or_slow(cases: dict[str, Any]) -> list[Any]:
    """Parameters by name, those in `SLOW` marked as such."""
    return [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in cases.items()]


@pytest.mark.parametrize("page", quick_or_slow({name_of(page): page for page in PAGES if has_commands(page)}))
def test_the_commands_of_a_page_work(page: Path, workshop: Workshop) -> None:
    output = ""
    before: Block | None = None
    for block in blocks_of(page):
        if block.language == "text" and before and "# exit status" in before.text:
            assert block.text in output, f"{name_of(page)}:{block.line}: not in the output, which is\n{output}"
        output = workshop.run(block)
        before = block


@pytest.mark.parametrize("example", quick_or_slow({example: example for example in examples()}))
def test_the_example_of_a_verb_works(example: str, workshop: Workshop) -> None:
    workshop.command(example)


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


@pytest.mark.parametrize("words", words_of_help(), ids=lambda words: words or "ropewalk")
def test_help_comes_quickly_and_begins_with_an_example(words: str) -> None:
    command = [sys.executable, "-m", "ropewalk", *words.split(), "--help"]
    # We promise 0.3 s; twice that is what a busy machine may take, and far less than an import of torch.
    fastest = float("inf")
    for _ in range(3):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        fastest = min(fastest, usage.ru_utime + usage.ru_stime)
        if fastest < 0.6:
            break
    assert fastest < 0.6
    usage_lines, example, *_ = (paragraph.strip() for paragraph in text.strip().split("\n\n"))
    assert usage_lines.startswith("Usage:")
    assert example.startswith("Example: ropewalk")


def test_every_verb_speaks_json() -> None:
    silent = [path for path, command in leaves() if not any("--json" in p.opts for p in command.params)]
    assert silent == []
