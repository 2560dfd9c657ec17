"""The files that raters get: `sheet-RATER.html`, `sheet-RATER.csv` and `instructions.md`. None of them names a system.

The page is one file without any request to elsewhere; its style and script are `sheet.css` and `sheet.js` beside this
module.
"""

from __future__ import annotations

import csv
import html
import io
import json
from pathlib import Path
from typing import Any

from ropewalk.base.files import committed_file

from .assignment import SheetLine
from .rating_form import RatingQuestion
from .sheet_key import SheetKey

_HERE = Path(__file__).parent
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings that a spreadsheet takes for a formula."""


def write_sheets(folder: Path, key: SheetKey) -> list[Path]:
    """Commits the sheets of all raters and the instructions; the paths written."""
    files = {folder / "instructions.md": _instructions(key).encode()}
    for rater in key.sheets:
        files[folder / f"sheet-{rater}.html"] = sheet_page(key, rater).encode()
        # With a byte order mark, by which spreadsheets know UTF-8.
        files[folder / f"sheet-{rater}.csv"] = _table(key, rater).encode("utf-8-sig")
    for path, data in files.items():
        with committed_file(path) as file:
            file.write(data)
    return list(files)


def shown_texts(key: SheetKey, line: SheetLine) -> list[str]:
    """The texts of a line in the order in which they are shown."""
    texts = list(key.items[line.item].texts)
    return texts[::-1] if line.swapped else texts


def sheet_page(key: SheetKey, rater: str) -> str:
    """The sheet of a rater as one HTML page."""
    lines = [
        {"id": line.id, "prompt": key.prompts[key.items[line.item].prompt].prompt, "texts": shown_texts(key, line)}
        for line in key.sheets[rater]
    ]
    name = key.sheet_name(rater)
    content = {
        "sheet": name,
        "mode": key.mode,
        "instructions": {"en": key.form.instructions, "zh": key.form.instructions_zh or key.form.instructions},
        "questions": [_question(question) for question in key.form.questions],
        "items": lines,
    }
    # `<` would end the script element.
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")
    style, script = ((_HERE / file).read_text("utf-8") for file in ("sheet.css", "sheet.js"))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            # No request leaves the page, whatever a text contains.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>{html.escape(name)}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            '<div id="sheet"></div>',
            "<noscript>This sheet needs JavaScript; fill in the CSV file instead. "
            "本表需要 JavaScript；也可以填写 CSV 文件。</noscript>",
            f'<script type="application/json" id="content">{data}</script>',
            f"<script>\n{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _question(question: RatingQuestion) -> dict[str, Any]:
    return {
        "name": question.name,
        "values": list(question.values),
        "text": {"en": question.text, "zh": question.text_zh or question.text},
        "low": {"en": question.low, "zh": question.low_zh or question.low},
        "high": {"en": question.high, "zh": question.high_zh or question.high},
    }


def _table(key: SheetKey, rater: str) -> str:
    texts = ("text_a", "text_b") if key.mode == "pairwise" else ("text",)
    output = io.StringIO(newline="")
    writer = csv.writer(output)
    names = [question.name for question in key.form.questions]
    writer.writerow(["sheet", "id", "number", "prompt", *texts, *names, "comment"])
    for number, line in enumerate(key.sheets[rater], start=1):
        prompt = key.prompts[key.items[line.item].prompt].prompt
        shown = [_plain(text) for text in (prompt, *shown_texts(key, line))]
        writer.writerow([key.sheet_name(rater), line.id, number, *shown, *("" for _ in names), ""])
    return output.getvalue()


def _plain(text: str) -> str:
    """With an apostrophe before what a spreadsheet would compute."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _instructions(key: SheetKey) -> str:
    form = key.form
    lines = ["# Instructions", "", form.instructions, ""]
    if form.instructions_zh:
        lines += [form.instructions_zh, ""]
    lines += ["## Questions", ""]
    for question in form.questions:
        scale = _scale(key, question)
        also = f" {question.text_zh}" if question.text_zh else ""
        lines.append(f"- `{question.name}`: {question.text}{also} ({scale})")
    lines += [
        "",
        "Open the page `sheet-….html` in a browser, answer, and send back the file that its button saves. Or fill in",
        "the columns of the questions in `sheet-….csv`; change nothing else. Leave out what you cannot answer.",
        "",
        "在浏览器中打开 `sheet-….html`，作答后用页面上的按钮保存文件并寄回；也可以只填写 `sheet-….csv` 中各问题的列。",
        "",
    ]
    return "\n".join(lines)


def _scale(key: SheetKey, question: RatingQuestion) -> str:
    if key.mode == "pairwise":
        return "A, B, or = for no difference"
    ends = [f"{question.least} = {question.low}" if question.low else str(question.least)]
    ends.append(f"{question.most} = {question.high}" if question.high else str(question.most))
    return f"whole numbers from {' to '.join(ends)}"
