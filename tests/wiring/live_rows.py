"""Keys of evaluation during training, and of contamination."""

from __future__ import annotations

from ropewalk.flow.recipe import Recipe
from tests.wiring.rows import Row
from tests.wiring.runs import Facts, folder, ready

QUIZ = 'evaluate.during.tasks=["held-out", "tests.train.test_live_evaluation:Quiz"]'
EVERY = "evaluate.during.every_steps=2"
ASKED = ('evaluate.tasks=["tests.evaluate.test_answers:Strands"]',)


def live(recipe: Recipe) -> Facts:
    """`ropewalk train`: the evaluations on the way."""
    from ropewalk.base.events import read_events
    from ropewalk.train.loop import train

    with folder() as place:
        run = ready(place, recipe)
        train(run)
        found = [event for event in read_events(run / "events.jsonl") if event["kind"] == "evaluation"]
    sizes = [event["tasks"].get("held-out", {}).get("bytes", {}).get("value") for event in found]
    return {
        "steps": [event["step"] for event in found],
        "tasks": [[*event["tasks"]] for event in found],
        "questions": [metric.get("n") for event in found for metric in event["tasks"].get("quiz", {}).values()],
        "bytes": sizes,
        "left out": [event["left_out"] for event in found],
    }


def searched(recipe: Recipe) -> Facts:
    """`ropewalk evaluate` beside a corpus: the tasks whose questions were looked for in it."""
    from ropewalk.evaluate.evaluation import evaluate
    from ropewalk.evaluate.held_out import HeldOut
    from tests.evaluate.tiny import CODE, planned, small, train_tokenizer, vivid, write_corpus

    with folder() as place:
        tokenizer = train_tokenizer(CODE)
        write_corpus(place / "data", {"py": ("code", CODE)}, tokenizer)
        model = vivid(small(vocabulary=tokenizer.get_vocab_size(), sequence_length=16))
        held_out = HeldOut(place / "data", recipe.evaluate, seed=recipe.seed)
        return {"searched": [*evaluate(planned(model, held_out), held_out).contamination]}


ROWS = [
    Row("evaluate.contamination", "false", "searched", ASKED, by=searched),
    Row("evaluate.during.every_steps", "2", "steps", by=live),
    Row("evaluate.during.tasks", QUIZ.partition("=")[2], "tasks", (EVERY,), by=live),
    Row("evaluate.during.limit", "2", "questions", (EVERY, QUIZ), by=live),
    Row("evaluate.during.max_bytes", "1000", "bytes", (EVERY,), by=live),
    Row("evaluate.during.budget_s", "1e-9", "left out", (EVERY,), by=live),
]
