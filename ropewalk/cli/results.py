"""What verbs print about a run, as text."""

from __future__ import annotations

from typing import Any

from ropewalk.base.progress import amount, duration

from .console import table


def run_text(summary: dict[str, Any]) -> str:
    """A finished run in a few lines."""
    rows = [
        ("parameters", amount(summary["parameters"])),
        ("trained on", f"{amount(summary['tokens'], 'tokens')} in {summary['steps']} steps"),
        ("held out", evaluation_line(summary)),
        (
            "for scale",
            f"zlib {summary['zlib_bits_per_byte']:.3f}, xz {summary['xz_bits_per_byte']:.3f} bits per byte",
        ),
    ]
    if summary.get("parse_rate") is not None:
        rows.append(("Python", f"{summary['parse_rate']:.0%} of sampled completions parse"))
    rows.append(("time", ", ".join(f"{stage} {duration(value)}" for stage, value in summary["seconds"].items())))
    rows.append(("report", summary["report"]))
    return table(rows)


def evaluation_line(results: dict[str, Any]) -> str:
    """Bits per byte and accuracy in one line."""
    return f"{results['bits_per_byte']:.3f} bits per byte, {results['accuracy']:.1%} of tokens guessed first"
