"""Each verb on a finished run: what it prints, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from ropewalk import flow
from ropewalk.cli.main import VERBS
from ropewalk.flow import generation, verbs
from ropewalk.flow.run_or_recipe import resolve_recipe
from tests.evaluate.code_examples import write_problems

from .conftest import Call

RUN = "runs/tiny"


def values(call: Call, *arguments: str) -> dict:
    ended = call(*arguments, "--json")
    assert ended.status == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "tiny.toml"],
        ["prepare", "tiny.toml"],
        ["prepare", "explain", "tiny.toml", "code:corpus/3.py"],
        ["prepare", "what-if", "tiny.toml", "filter.min_characters=300"],
        ["prepare", "report", "tiny.toml"],
        ["plan", "tiny.toml"],
        ["plan", "draw", "tiny.toml", "--ranks", "2"],
        ["model", "describe", "tiny.toml"],
        ["train", "tiny.toml"],
        ["train", "tiny.toml", "--dry-run"],
        ["evaluate", "tiny.toml"],
        ["score", "--references", "tiny.toml", "--predictions", "tiny.toml"],
        ["code", "score", "problems.jsonl", "--sandbox", "none"],
        ["human", "export", RUN, "--out", "sheets"],
        ["generate", RUN, "--prompt", "def rope", "--tokens", "5"],
        ["chat", RUN, "--tokens", "3"],
        ["checkpoint", "list", RUN],
        ["checkpoint", "show", RUN],
        ["checkpoint", "verify", RUN],
        ["doctor", "data", "tiny.toml"],
        ["launch", "slurm", "tiny.toml"],
        ["launch", "kubernetes", "tiny.toml", "--image", "example.org/ropewalk:0.1"],
        ["monitor", RUN],
        ["compare", RUN, RUN],
        ["report", RUN],
        ["recipe", "check", "tiny.toml"],
        ["recipe", "show", "tiny.toml"],
        ["recipe", "diff", "tiny.toml", "tiny.toml"],
        ["new", "other.toml", "corpus"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_every_verb_prints_text_and_json(
    arguments: list[str], trained: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments[0] == "code":
        write_problems(Path("problems.jsonl"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("rope\n"))
    assert call(*arguments).out.strip()
    monkeypatch.setattr(sys, "stdin", io.StringIO("rope\n"))
    if arguments[0] == "new":
        arguments = [*arguments, "--force"]
    if arguments[0] == "human":
        arguments = [*arguments[:-1], "other-sheets"]
    json.loads(call(*arguments, "--json").out)


def test_the_cases_above_cover_every_verb_but_the_long_ones() -> None:
    marks = test_every_verb_prints_text_and_json.pytestmark[0].args[1]
    # test_bench.py has `bench` and `profile`, whose runs it makes small.
    assert {arguments[0] for arguments in marks} == set(VERBS) - {"quickstart", "chaos", "bench", "profile"}


def test_results_go_to_stdout_and_progress_to_stderr(tiny: Path, call: Call) -> None:
    ended = call("run", "tiny.toml", "--json")
    assert json.loads(ended.out)["name"] == "tiny"
    assert "train" in ended.err


def test_a_run_ends_with_everything_that_is_promised(trained: Path) -> None:
    summary = json.loads((trained / RUN / "summary.json").read_text())
    wanted = "parameters tokens seconds bits_per_byte zlib_bits_per_byte xz_bits_per_byte accuracy parse_rate"
    assert all(summary[key] is not None for key in wanted.split())
    assert set(summary["seconds"]) == {"prepare", "plan", "train", "evaluate", "total"}
    assert summary["tokens"] == 6 * 4 * 32
    assert "This run is not finished" not in (trained / RUN / "report.html").read_text()


def test_the_same_seed_gives_the_same_text(trained: Path, call: Call) -> None:
    one, two, other = (
        values(call, "generate", RUN, "--prompt", "rope", "--seed", seed)["completion"] for seed in ("1", "1", "2")
    )
    assert one == two
    assert one != other


def test_a_file_of_prompts_is_completed_at_once(trained: Path, call: Call, tmp_path: Path) -> None:
    prompts = ["rope", "def rope", "rope", "a much longer prompt that fills the context of this model and more"]
    (tmp_path / "many.txt").write_text("\n\n".join(prompts))
    lines = "\n".join(json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts)
    (tmp_path / "many.jsonl").write_text(lines)
    options = ["--prompts", str(tmp_path / "many.txt"), "--tokens", "9", "--json"]
    drawn = call("generate", RUN, *options)
    found = [json.loads(line) for line in drawn.out.splitlines()]
    assert [each["prompt"] for each in found] == prompts
    assert found[0]["completion"] != found[2]["completion"], "equal prompts draw different texts"
    options[1] = str(tmp_path / "many.jsonl")
    assert call("generate", RUN, *options).out == drawn.out
    plain = call("generate", RUN, *options[:-1]).out
    assert plain == "".join(f"{each['prompt']}{each['completion']}\n\n" for each in found)
    greedy = call("generate", RUN, *options, "--temperature", "0").out.splitlines()
    alone = values(call, "generate", RUN, "--prompt", "def rope", "--tokens", "9", "--temperature", "0")
    assert json.loads(greedy[1]) == alone


def test_prompts_that_cannot_be_read_are_named(trained: Path, call: Call, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    for content, words in (
        ('{"prompt": "a"}\n{"text": "b"}', "many.jsonl:2: no prompt"),
        ("[", ":1: no JSON"),
        ("", "no p"),
    ):
        file.write_text(content)
        ended = call("generate", RUN, "--prompts", str(file))
        assert ended.status == 2
        assert words in ended.err
    assert "give one of them" in call("generate", RUN, "--prompts", str(file), "--prompt", "a").err
    assert call("generate", RUN, "--prompts", str(tmp_path / "none.txt")).status == 2


def test_every_sampling_option_changes_the_text(trained: Path, call: Call) -> None:
    drawn = ["generate", RUN, "--prompt", "rope", "--tokens", "20", "--temperature", "2"]
    usual = values(call, *drawn)["completion"]
    options = ("--top-p=0.01", "--min-p=1", "--repetition-penalty=9", "--top-k=1", "--precision=bf16")
    others = [values(call, *drawn, option)["completion"] for option in options]
    assert usual not in others[:4]
    # A greedy choice in three ways.
    assert others[0] == others[1] == others[3]
    stop = usual[3:6]
    assert values(call, *drawn, "--stop", "\x00", "--stop", stop)["completion"] == usual.split(stop)[0]
    chat = ["generate", RUN, "--chat", "rope", "--template", "plain", "--tokens", "20"]
    answer = values(call, *chat)["completion"]
    assert values(call, *chat, "--stop", answer[2:4])["completion"] == answer.split(answer[2:4])[0]


def test_a_document_is_explained_by_its_id_and_a_wrong_id_gets_a_suggestion(trained: Path, call: Call) -> None:
    story = values(call, "prepare", "explain", "tiny.toml", "code:corpus/3.py")
    assert story["outcome"] == "kept"
    wrong = call("prepare", "explain", "tiny.toml", "code:corpus/3.pyy")
    assert wrong.status == 2
    assert "code:corpus/3.py" in wrong.err


def test_a_setting_that_may_change_is_recorded(trained: Path, call: Call) -> None:
    assert call("run", "tiny.toml", "train.log_every_steps=1").status == 0
    events = [json.loads(line) for line in (trained / RUN / "events.jsonl").read_text().splitlines()]
    changed = [event for event in events if event["kind"] == "config_changed"]
    assert [(e["key"], e["before"], e["after"]) for e in changed] == [("train.log_every_steps", 2, 1)]


def test_new_evaluation_settings_measure_anew_without_training(trained: Path, call: Call) -> None:
    before = (trained / RUN / "stages/train.json").read_bytes()
    result = values(call, "evaluate", "tiny.toml", "evaluate.max_bytes=1500")
    assert result["bytes"] <= 1500
    assert (trained / RUN / "stages/train.json").read_bytes() == before


def test_a_new_recipe_is_valid_and_holds_every_setting(tiny: Path, call: Call) -> None:
    assert call("new", "mine.toml", "corpus", "--name", "mine").status == 0
    assert call("recipe", "check", "mine.toml").status == 0
    text = (tiny / "mine.toml").read_text()
    assert "#momentum = 0.95" in text
    assert call("new", "mine.toml", "corpus").status == 2
    always = re.sub(r"^#\[.*?(?=^#?\[|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)  # without optional tables
    settings = [line[1:] if re.match(r"#\S", line) else line for line in always.split("\n")]
    given = [line for line in settings if not line.endswith("= ...")]
    (tiny / "all.toml").write_text("\n".join(given))
    assert values(call, "recipe", "diff", "mine.toml", "all.toml") == {}


@pytest.mark.parametrize(
    ("arguments", "work", "told"),
    [
        (["run", "tiny.toml"], "run", "interrupted; the same command continues"),
        (["bench", "train"], "bench_train", "interrupted"),
    ],
    ids=["run", "bench"],
)
def test_who_is_interrupted_is_told_whether_the_work_is_kept(
    arguments: list[str], work: str, told: str, tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(flow, work, interrupted)
    ended = call(*arguments)
    assert (ended.status, ended.err.strip()) == (130, told)


def test_an_unknown_verb_gets_a_suggestion(call: Call) -> None:
    ended = call("quikstart")
    assert ended.status == 2
    assert "did you mean `quickstart`?" in ended.err


def test_an_interrupt_ends_with_130_and_says_how_to_continue(
    tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "advance", interrupted)
    ended = call("run", "tiny.toml")
    assert ended.status == 130
    assert "the same command continues" in ended.err


def test_the_shell_completes_verbs() -> None:
    words = {"_ROPEWALK_COMPLETE": "complete_bash", "COMP_WORDS": "ropewalk qui", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'ropewalk'; from ropewalk.cli.main import main; main()"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["quickstart"]


def test_a_recipe_built_in_python_runs_and_is_checked(tiny: Path) -> None:
    recipe = resolve_recipe("tiny.toml").value
    assert flow.prepare(flow.recipe_from(recipe))["train_tokens"] > 0


def test_an_interrupt_during_training_saves_the_last_step(tiny: Path) -> None:
    whole = flow.train("tiny.toml", ["name=whole"])
    command = [sys.executable, "-m", "ropewalk", "train", "tiny.toml", "train.steps=2000", "train.log_every_steps=1"]
    process = subprocess.Popen([*command, "checkpoint.save_every_steps=1999"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    events = tiny / RUN / "events.jsonl"
    while time.monotonic() < deadline and not (events.exists() and '"kind": "step"' in events.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=200) == 130
    assert "interrupted: saved step" in process.stderr.read()
    assert list((tiny / RUN / "checkpoints").iterdir())
    assert whole["step"] == 6


def test_a_finished_run_whose_newest_manifest_is_lost_trains_on_from_the_older(trained: Path, call: Call) -> None:
    newest = sorted((trained / RUN / "checkpoints").iterdir())[-1]
    before = (newest / "model.safetensors").read_bytes()
    (newest / "manifest.json").unlink()
    assert call("run", "tiny.toml").status == 0
    assert (newest / "model.safetensors").read_bytes() == before


def test_a_continued_run_tells_which_steps_it_made(trained: Path, call: Call) -> None:
    shutil.rmtree(sorted((trained / RUN / "checkpoints").iterdir())[-1])
    assert "steps 5 to 6 in" in call("train", "tiny.toml").err
    assert "6 steps in" in call("train", "tiny.toml", "--new").err


def test_training_ends_with_whole_numbers(trained: Path, call: Call) -> None:
    lines = [line.split() for line in call("train", "tiny.toml", "train.steps=100", "--new").out.splitlines()]
    assert ["tokens", "12,800"] in lines


def test_text_is_drawn_from_the_checkpoint_that_is_there_when_torch_is_loaded(
    trained: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on meanwhile, and prunes."""
    real, newest = generation.needs_torch, sorted((trained / RUN / "checkpoints").iterdir())[-1]

    def slowly(module: str, purpose: str) -> ModuleType:
        newest.rename(newest.with_name("step-00000009"))
        return real(module, purpose)

    monkeypatch.setattr(generation, "needs_torch", slowly)
    assert call("generate", RUN, "--prompt", "rope").status == 0


def test_a_document_is_explained_whatever_the_model_settings_are(trained: Path, call: Call) -> None:
    story = values(call, "prepare", "explain", "tiny.toml", "code:corpus/3.py", "model.layers=9")
    assert story["id"] == "code:corpus/3.py"


def test_a_prompt_that_is_not_text_is_refused(trained: Path, call: Call) -> None:
    ended = call("generate", RUN, "--prompt", "\udcff")
    assert ended.status == 2
    assert "not UTF-8" in ended.err
    assert not ended.out


def test_prepare_says_what_was_removed(tiny: Path, call: Call) -> None:
    (tiny / "corpus" / "short.txt").write_text("short\n")
    ended = call("prepare", "tiny.toml", "--json")
    assert "removed by rule: min_characters 1" in ended.err
    assert json.loads(ended.out)["removed"] == {"min_characters": 1}


def test_files_that_are_passed_over_are_among_the_warnings(tiny: Path, call: Call) -> None:
    (tiny / "corpus" / "picture.png").write_bytes(b"png")
    settings = ["prepare.sources.0.paths=['corpus']", "prepare.sources.1.paths=['corpus']"]
    warnings = json.loads(call("prepare", "tiny.toml", *settings, "--json").out)["warnings"]
    assert any("passed over" in line for line in warnings)


def test_what_if_tells_losses_and_asks_for_settings_of_the_filter(trained: Path, call: Call) -> None:
    found = values(call, "prepare", "what-if", "tiny.toml", "filter.min_characters=1000000")
    assert found["total"]["documents_after"] == 0
    assert found["total"]["lost_documents"] == found["total"]["documents"] > 0
    assert found["lost_to"] == {"min_characters": found["total"]["documents"]}
    refused = call("prepare", "what-if", "tiny.toml", "model.layers=2")
    assert refused.status == 2
    assert "filter.min_characters=100; `model.layers=2` is none of them" in refused.err
    assert "did you mean `min_characters`?" in call("prepare", "what-if", "tiny.toml", "filter.min_character=1").err


def test_the_report_of_prepared_data_is_one_page(trained: Path, call: Call) -> None:
    page = Path(values(call, "prepare", "report", "tiny.toml")["report"])
    assert page.parent.parent.name == "prepared"
    text = page.read_text("utf-8")
    for heading in (
        "Funnel",
        "Overlap of rules",
        "Samples of removed documents",
        "Repeats",
        "Fertility",
        "Composition",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_prepare_without_a_recipe_says_what_is_missing(call: Call) -> None:
    ended = call("prepare")
    assert ended.status == 2
    assert "recipe" in ended.err


def test_a_question_needs_a_template_and_is_not_a_prompt(trained: Path, call: Call) -> None:
    answered = values(call, "generate", RUN, "--chat", "why?", "--template", "plain", "--tokens", "3")
    assert answered["prompt"] == "why?"
    unknown = call("generate", RUN, "--chat", "why?")
    assert (unknown.status, "name one with --template" in unknown.err) == (2, True)
    both = call("generate", RUN, "--chat", "why?", "--prompt", "because")
    assert (both.status, "give one of them" in both.err) == (2, True)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (["prepare"], "tiny: prepared, training has not begun"),
        (["train"], "tiny: trained, step 6 of 6"),
        (["train", "--detach"], "tiny: trained, step 6 of 6"),
        (["evaluate"], "tiny: evaluated, step 6 of 6"),
    ],
    ids=["prepare", "train", "train detached", "evaluate"],
)
def test_monitor_says_how_far_a_run_was_taken(tiny: Path, call: Call, verb: list[str], words: str) -> None:
    started = call(verb[0], "tiny.toml", *verb[1:], "--json")
    assert started.status == 0, started.err
    if "--detach" in verb:
        os.waitpid(json.loads(started.out)["pid"], 0)
    told = call("monitor", RUN).out
    assert told.startswith(words)
    assert "`ropewalk run`" in told
    assert "not finished" not in told
    assert "continues it" not in told


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "runs/tiny", "--tokens", "9" * 20],
        ["chat", "runs/tiny", "--tokens", "9" * 20],
        ["checkpoint", "reshard", "runs/tiny", "out", "--ranks", "1000000000"],
        ["doctor", "data", "tiny.toml", "--cores", "9" * 30],
        ["launch", "slurm", "tiny.toml", "--nodes", "9" * 30],
        ["run", "tiny.toml", "evaluate.max_new_tokens=9223372036854775807"],
        ["run", "tiny.toml", "evaluate.samples=9223372036854775807"],
        ["plan", "tiny.toml", "model.layers=9223372036854775807"],
    ],
    ids=lambda command: " ".join(command)[:40],
)
def test_a_number_beyond_all_reason_is_refused_at_once(tiny: Path, call: Call, command: list[str]) -> None:
    ended = call(*command)
    assert ended.status == 2
    assert "less than or equal to" in ended.err or "at most" in ended.err
