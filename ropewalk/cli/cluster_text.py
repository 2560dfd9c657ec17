"""What `ropewalk doctor cluster` prints."""

from __future__ import annotations

from typing import Any


def cluster_text(found: dict[str, Any]) -> str:
    """The findings as a table, what is not ok with its remedy below, and the verdict."""
    rows = [(each["check"], each["outcome"], each["found"]) for each in found["findings"]]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent = " " * (first + second + 4)
    lines = []
    for (check, outcome, text), each in zip(rows, found["findings"], strict=True):
        expected = f"; expected {each['expected']}" if outcome == "ok" and each["expected"] else ""
        lines.append(f"{check:<{first}}  {outcome:<{second}}  " + text.replace("\n", f"\n{indent}  ") + expected)
        if outcome != "ok":
            told = (("expected", each["expected"]), ("remedy", each["remedy"]))
            lines += [f"{indent}{word}: {value}" for word, value in told if value]
    return "\n".join([*lines, "", _verdict(found)])


def _verdict(found: dict[str, Any]) -> str:
    outcomes = [each["outcome"] for each in found["findings"]]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("missing", "wrong", "slow") if kind in outcomes)
    if not counts:
        return f"all {len(outcomes)} checks are ok"
    return f"{counts}: " + ("the launch can start" if found["ok"] else "do not launch yet")
