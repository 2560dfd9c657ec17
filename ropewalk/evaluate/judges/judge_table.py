"""Judges by name."""

from __future__ import annotations

from ropewalk.config.registry import Kind, Registry

JUDGES = Registry(
    "judge",
    {
        "profanity": Kind(
            target="ropewalk.evaluate.judges.profanity:Profanity",
            doc="A linear model of insulting words in the package alt-profanity-check; English.",
        ),
        "perspective": Kind(
            target="ropewalk.evaluate.judges.perspective:Perspective",
            doc="The Perspective API: sends completions over the network; key in PERSPECTIVE_API_KEY.",
        ),
        "lexical_relevance": Kind(
            target="ropewalk.evaluate.judges.lexical:LexicalRelevance",
            doc="Content words that a reply shares with the turn before it.",
        ),
        "lexical_consistency": Kind(
            target="ropewalk.evaluate.judges.lexical:LexicalConsistency",
            doc="Sentences that repeat an earlier one without its negation or with another number.",
        ),
    },
    methods=("scores",),
)
"""Small models that score texts: each target makes a `TextJudge` (evaluate/judges/judge.py)."""
