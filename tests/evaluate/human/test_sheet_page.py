"""The page of a rater: blind, offline, and in a browser its keys answer and its answers come back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ropewalk.evaluate.human.sheet_key import read_key
from ropewalk.flow import export_sheets, import_ratings

from .studies import write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def study(tmp_path: Path) -> Path:
    runs = [write_run(tmp_path / "secret-one"), write_run(tmp_path / "secret-two")]
    export_sheets(runs, tmp_path / "study", items=9, raters=2, repeat=0.2)
    return tmp_path / "study"


def content_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="content">(.*?)</script>', page)[1])


def test_no_sheet_names_a_system_and_every_sheet_has_all_texts(study: Path) -> None:
    key = read_key(study)
    texts = sorted(text for item in key.items for text in item.texts)
    for path in (*study.glob("sheet-*"), study / "instructions.md"):
        # The texts of these runs name their run, which only this test does.
        said = re.sub(r"of secret-\w+ by", "by", path.read_text("utf-8"))
        assert not re.search("secret|samples.jsonl|runs", said), path.name
    for rater in key.sheets:
        items = content_of((study / f"sheet-{rater}.html").read_text("utf-8"))["items"]
        assert sorted({text for item in items for text in item["texts"]}) == texts
        assert [item["id"] for item in items] == [line.id for line in key.sheets[rater]]


def test_the_page_asks_for_nothing_from_elsewhere(study: Path) -> None:
    page = (study / "sheet-r1.html").read_text("utf-8")
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)=|https?://|@import|url\(", page) == []


def test_a_character_cut_at_the_end_of_a_text_is_not_shown(tmp_path: Path) -> None:
    """The author's continuation would complete it and the model's would not: that would give them away."""
    run = write_run(tmp_path / "run", prompts=1)
    text = (run / "samples.jsonl").read_text("utf-8").partition("\n")[2]
    text = (
        text.replace("begins", "begins\ufffd").replace('" as text', '"\ufffdas text').replace("author.", "author\ufffd")
    )
    (run / "samples.jsonl").write_text(text, "utf-8")
    export_sheets([run], tmp_path / "study", items=2, raters=1)
    assert "\ufffd" not in (tmp_path / "study/sheet-r1.html").read_text("utf-8")
    assert len(read_key(tmp_path / "study").items) == 2


def test_a_text_cannot_break_out_of_the_page_or_become_a_formula(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", words='</script><img src=x onerror="alert(1)"> =1+1')
    text = (run / "samples.jsonl").read_text("utf-8").partition("\n")[2].replace('" as text', '"=1+1 as text')
    (run / "samples.jsonl").write_text(text, "utf-8")  # lines without a seal are those of an earlier version
    export_sheets([run], tmp_path / "study", items=4, raters=1, human="no")
    page = (tmp_path / "study/sheet-r1.html").read_text("utf-8")
    assert page.count("</script>") == 2
    assert content_of(page)["items"][0]["texts"][0].startswith("=1+1 as text")
    assert "\"'=1+1 as text" in (tmp_path / "study/sheet-r1.csv").read_text("utf-8-sig")


DRIVE = """<script>
const hit = (key, more) =>
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
const seen = [];
hit("4"); hit("2"); hit("9"); hit("5");
seen.push(document.getElementById("count").textContent);
hit("Enter"); hit("1");
document.querySelector('input[value="3"]').click();
seen.push(state.at, document.querySelectorAll("fieldset").length, document.querySelectorAll("legend").length);
hit("Enter", { shiftKey: true });
seen.push(state.at, Object.keys(JSON.parse(localStorage.getItem(place)).answers).length);
document.querySelector("header button").click();
seen.push(document.documentElement.lang, document.querySelector("summary").textContent);
const out = document.createElement("pre");
out.id = "out";
out.textContent = JSON.stringify({ seen, csv: filled("csv"), json: filled("json") });
document.body.append(out);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_keys_answer_and_what_the_page_saves_is_read(study: Path, tmp_path: Path) -> None:
    page = tmp_path / "driven.html"
    page.write_text((study / "sheet-r1.html").read_text("utf-8").replace("</body>", DRIVE), "utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--lang=en",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run([BROWSER, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-500:]
    out = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert out["seen"] == ["1 of 11 items answered", 1, 3, 3, 0, 2, "zh-Hans", "说明"]
    for kind in ("csv", "json"):
        (tmp_path / f"filled.{kind}").write_text(out[kind], "utf-8")
    result = import_ratings(study, [tmp_path / "filled.csv", tmp_path / "filled.json"])
    assert [each["ratings"] for each in result["files"]] == [4, 4]
    assert result["added"] == 4
