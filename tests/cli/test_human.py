"""`ropewalk human`: from a run to sheets, ratings, results and HUSE."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ropewalk.base.seal import sealed_lines
from ropewalk.evaluate.results import read_samples
from ropewalk.flow import export_sheets, import_ratings
from ropewalk.flow.human import log_probabilities
from tests.evaluate.human.studies import by_system, fill, write_run

from .conftest import Call


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/one")
    write_run(tmp_path / "runs/two")
    return tmp_path


def test_sheets_become_a_table_with_intervals_agreement_and_raters_needed(two_runs: Path, call: Call) -> None:
    ended = call("human", "export", "runs/one", "runs/two", "--out", "study", "--items", "18", "--raters", "2")
    assert ended.status == 0, ended.err
    assert "human, one, two" in ended.out
    for rater in ("r1", "r2"):
        fill(two_runs / "study", rater, by_system)
    ended = call("human", "import", "study", "study/filled-r1.csv", "study/filled-r2.csv", "--run", "runs/one")
    assert ended.status == 0, ended.err
    for sign in (
        "18 items, 120 of 120 ratings by 2 raters",
        r"Krippendorff alpha, ordinal +1\.000 +\[1\.00, 1\.00\]",
        r"Cohen kappa +1\.000",
        r"same answer when asked again +100 % of 4 +\[0\.51, 1\.00\]",
        r"human - one: \+3\.00 ",
        "2 of 2 raters agree",
        r"a mean of 2 raters and 6 items per system is known to \+- 0\.\d\d; for \+- 0\.25: ",
    ):
        assert re.search(sign, ended.out), sign
    shown = json.loads(call("human", "show", "study", "--json").out)
    copied = json.loads((two_runs / "runs/one/evaluation/human.json").read_text())
    assert copied.items() >= shown.items()
    means = {each["system"]: each["mean"] for each in shown["questions"]["typical"]["systems"]}
    assert means["human"] > 4 > 2 > means["one"] == means["two"]


def test_pairs_are_read_in_the_order_of_the_systems_whatever_side_they_stood_on(two_runs: Path) -> None:
    runs = [two_runs / "runs/one"]
    export_sheets(runs, two_runs / "study", items=8, raters=2, mode="pairwise", repeat=0.25)

    def human_wins(rater: str, question: str, item: dict, line: dict) -> str:
        first = item["systems"][0] == "human"
        return "A" if first != line["swapped"] else "B"

    files = [fill(two_runs / "study", rater, human_wins) for rater in ("r1", "r2")]
    found = import_ratings(two_runs / "study", files)["questions"]["better"]
    (preferred,) = found["systems"]
    assert (preferred["system"], preferred["mean"]) == ("one over human", 0)
    assert found["self_agreement"]["equal"] == 1
    always_left = [fill(two_runs / "study", rater, lambda *_: "A") for rater in ("r1", "r2")]
    result = import_ratings(two_runs / "study", always_left)
    found = result["questions"]["better"]
    assert (found["systems"][0]["mean"], found["self_agreement"]["equal"]) == (0.5, 0)
    assert "better: raters prefer one side (100 % chose A)" in result["notes"]


def test_yes_and_no_are_shares(two_runs: Path) -> None:
    export_sheets([two_runs / "runs/one"], two_runs / "study", items=8, raters=1, mode="binary")
    sheet = fill(two_runs / "study", "r1", lambda rater, question, item, line: int(item["systems"] == ["human"]))
    found = import_ratings(two_runs / "study", [sheet])["questions"]["human"]
    assert [(each["system"], each["mean"]) for each in found["systems"]] == [("human", 1), ("one", 0)]


def test_own_questions_are_asked_and_their_scale_is_kept(two_runs: Path, call: Call) -> None:
    (two_runs / "form.toml").write_text(
        'instructions = "Read."\n[[questions]]\nname = "kind"\ntext = "Is it kind?"\nleast = 0\nmost = 10\n'
    )
    export = ("human", "export", "runs/one", "--out")
    assert call(*export, "study", "--raters", "1", "--questions", "form.toml").status == 0
    sheet = fill(two_runs / "study", "r1", lambda *_: 10)
    assert import_ratings(two_runs / "study", [sheet])["questions"]["kind"]["scale"] == [0, 10]
    (two_runs / "form.toml").write_text('[[questions]]\nname = "kind"\ntext = "?"\nmost = 100\n')
    ended = call(*export, "other", "--questions", "form.toml")
    assert ended.status == 2
    assert "a scale has 2 to 11 values, not those of 1 to 100" in ended.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("export", "runs/none", "--out", "a"), "runs/none: there is no such run"),
        (("export", "runs/one", "--out", "a", "--repeat", "0.9"), "give a share from 0 to 0.5"),
        (("export", "runs/one", "--out", "a", "--task", "arc"), "evaluation/items.jsonl: no such file of answers"),
        (("export", "runs/old", "--out", "a", "--human"), "no text by people"),
        (("export", "runs/old", "--out", "a", "--mode", "pairwise"), "name two runs"),
        (("import", "runs/one", "x.csv"), "no key.json; name a folder that `ropewalk human export` wrote"),
        (("show", "sheets"), "no human.json; `ropewalk human import` writes it"),
    ],
)
def test_what_cannot_be_done_says_why(two_runs: Path, call: Call, words: tuple[str, ...], told: str) -> None:
    write_run(two_runs / "runs/old", reference=False)
    export_sheets([two_runs / "runs/one"], two_runs / "sheets")
    ended = call("human", *words)
    assert ended.status == 2
    assert told in ended.err


def test_answers_of_a_task_are_rated_with_their_references(two_runs: Path) -> None:
    rows = [
        {"task": task, "key": f"{n}", "group": "", "prompt": f"Q{n}", "prediction": f"p{n}", "reference": f"r{n}"}
        for task in ("arc", "gsm8k")
        for n in range(3)
    ]
    (two_runs / "runs/one/evaluation").mkdir()
    (two_runs / "runs/one/evaluation/items.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    made = export_sheets([two_runs / "runs/one"], two_runs / "study", items=6, raters=1, task="arc")
    assert (made["systems"], made["items"]) == (["human", "one"], 6)


def test_log_probabilities_are_those_of_the_tokens_one_by_one(trained: Path) -> None:
    """Beside the model itself, called token by token on the whole text."""
    torch = pytest.importorskip("torch")
    from ropewalk.checkpoint.format import list_checkpoints
    from ropewalk.evaluate.from_checkpoint import load_model

    run = trained / "runs/tiny"
    samples = read_samples(run)
    texts = [(row["prompt"], row["completion"]) for row in samples] + [("", samples[0]["prompt"]), ("a rope", "")]
    path = list_checkpoints(run / "checkpoints")[-1]
    model, _, tokenizer = load_model(path, device=torch.device("cpu"))
    end = tokenizer.token_to_id("<|endoftext|>")
    for (before, after), (found, tokens) in zip(texts, log_probabilities(run, texts), strict=True):
        whole = tokenizer.encode(before + after, add_special_tokens=False).ids
        skipped = len(tokenizer.encode(before, add_special_tokens=False).ids)
        expected = 0.0
        for place in range(skipped, len(whole)):
            with torch.no_grad():
                hidden = model(torch.tensor([[end, *whole[:place]]]))
                logits = model.logits(hidden)[0, -1]
            expected += float(logits.double().log_softmax(-1)[whole[place]])
        assert tokens == len(whole) - skipped
        assert found == pytest.approx(expected, abs=1e-4)


def test_huse_of_a_trained_run_is_kept_beside_its_ratings(trained: Path, call: Call) -> None:
    rows = [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(6) for row in read_samples(trained / "runs/tiny")]
    assert all(row["reference"] for row in rows)
    (trained / "runs/tiny/samples.jsonl").write_bytes(sealed_lines(rows))
    assert call("human", "export", "runs/tiny", "--out", "study", "--raters", "2", "--repeat", "0").status == 0
    files = [str(fill(trained / "study", rater, by_system)) for rater in ("r1", "r2")]
    assert call("human", "import", "study", *files).status == 0
    ended = call("human", "huse", "study", "--run", "runs/tiny", "--json")
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert found["diversity"] == pytest.approx(1 + found["huse"] - found["quality"])
    assert "temperature 0.7 and top-k 50" in found["notes"][0]
    shown = call("human", "show", "study").out
    assert "HUSE-D (diversity)" in shown
    assert call("human", "import", "study", *files).status == 0
    assert "huse" in json.loads(call("human", "show", "study", "--json").out)
    files = [str(fill(trained / "study", rater, lambda *_: 3)) for rater in ("r1", "r2")]
    assert call("human", "import", "study", *files).status == 0  # of other ratings: it is not kept
    assert "huse" not in json.loads(call("human", "show", "study", "--json").out)
    assert np.isfinite(json.loads(call("human", "huse", "study", "--run", "runs/tiny", "--json").out)["huse"])
