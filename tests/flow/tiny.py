"""A recipe that goes from raw files to a report in under a second."""

from __future__ import annotations

import random
from pathlib import Path

RECIPE = """\
name = "tiny"
seed = 7

[[prepare.sources]]
name = "code"
domain = "code"
paths = ["corpus/*.py"]

[[prepare.sources]]
name = "notes"
domain = "prose"
paths = ["corpus/*.txt"]

[prepare]
validation_share = 0.2
workers = 1
[prepare.filter]
min_characters = 50
[prepare.tokenizer]
vocab_size = 300

[load]
sequence_length = 32

[model]
layers = 2
width = 32
heads = 2

[train]
steps = 6
batch_size = 4
log_every_steps = 2
validate_every_steps = 3
validation_sequences = 4
threads = 1
schedule.warmup_steps = 2

[plan]
microbatch_size = 2

[checkpoint]
save_every_steps = 2

[evaluate]
max_bytes = 3000
samples = 2
prompt_tokens = 8
max_new_tokens = 8
"""

WORDS = ("rope", "walk", "strand", "yarn", "hemp", "twist", "lay", "comb", "spin", "tar", "hall", "knot", "cable")


def write_tiny(folder: Path) -> Path:
    """A corpus of 40 small files and `tiny.toml` in `folder`; the recipe's path."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    draw = random.Random(0)
    for number in range(20):
        names = draw.sample(WORDS, 4)
        lines = [f"def {name}({names[0]}):\n    return {names[0]} + {number}\n" for name in names]
        (corpus / f"{number}.py").write_text("\n".join(lines))
        prose = [" ".join(draw.choices(WORDS, k=12)) + "." for _ in range(6)]
        (corpus / f"{number}.txt").write_text("\n".join(prose) + "\n")
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE)
    return recipe
