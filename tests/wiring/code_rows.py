"""Keys of `[evaluate]` for the tasks that run generated code."""

from __future__ import annotations

from types import SimpleNamespace

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Silent
from ropewalk.evaluate.task import Generation
from ropewalk.evaluate.tasks.code import HumanEval
from ropewalk.flow.recipe import Recipe
from tests.evaluate.code_examples import MBPP, PROBLEMS, write_problems
from tests.wiring.rows import Row
from tests.wiring.runs import Facts, folder

LOOKS = {
    "task_id": 1,
    "text": "Look whether the machine's files are there.",
    "code": "",
    "test_list": ["assert look()"],
}
LOOKING = "import os\ndef look():\n    return os.path.exists('/etc') and len(os.listdir('/etc')) > 3\n"


def coded(recipe: Recipe) -> Facts:
    """What a task asks of the model, and the verdict on a program that looks for the files of this machine."""
    with folder() as place:
        for name, problems in {"ours": PROBLEMS, "mbpp": MBPP, "looks": [LOOKS]}.items():
            write_problems(place / f"{name}.jsonl", problems)
        task = HumanEval(SimpleNamespace(settings=recipe.evaluate, progress=Silent()))  # type: ignore[arg-type]
        try:
            requests = task.requests()
            if recipe.evaluate.code_problems == "looks.jsonl":
                return {"verdict": task.item(task.questions[0], [Generation([], LOOKING)]).verdicts}
        except UserError:
            return {"verdict": "no sandbox works here"}
        return {"requests": len(requests), "prompts": [getattr(request, "prompt", "") for request in requests]}


OURS = ('evaluate.code_problems="ours.jsonl"', 'evaluate.sandbox="none"')
ROWS = [
    Row("evaluate.code_problems", '"mbpp.jsonl"', "prompts", OURS, by=coded),
    Row("evaluate.code_samples", "3", "requests", OURS, by=coded),
    Row("evaluate.sandbox", "none", "verdict", ('evaluate.code_problems="looks.jsonl"',), by=coded),
]
