"""Five problems of our own in the format of HumanEval, two in that of MBPP, with solutions and broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def _problem(number: int, entry: str, signature: str, doc: str, body: str, *checks: str) -> dict[str, Any]:
    lines = "\n".join(f"    assert {check}" for check in checks)
    return {
        "task_id": f"Ours/{number}",
        "prompt": f'from typing import List\n\n\ndef {entry}({signature}):\n    """{doc}"""\n',
        "entry_point": entry,
        "canonical_solution": body,
        "test": f"def check(candidate):\n{lines}\n",
    }


PROBLEMS = [
    _problem(
        *(0, "turns", "rope: List[int]", "How often the numbers change direction."),
        "    steps = [b - a for a, b in zip(rope, rope[1:]) if a != b]\n"
        "    return sum((x > 0) != (y > 0) for x, y in zip(steps, steps[1:]))\n",
        *("candidate([1, 3, 2, 4]) == 2", "candidate([]) == 0", "candidate([2, 2, 2]) == 0"),
    ),
    _problem(
        *(1, "knots", "text: str", "The longest run of equal letters."),
        "    best = run = 0\n    last = ''\n    for letter in text:\n        run = run + 1 if letter == last else 1\n"
        "        last, best = letter, max(best, run)\n    return best\n",
        *("candidate('aabbbc') == 3", "candidate('') == 0", "candidate('绳绳x') == 2"),
    ),
    _problem(
        *(2, "strands", "n: int", "Ways to write n as an ordered sum of 1 and 2."),
        "    a, b = 1, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
        *("candidate(0) == 1", "candidate(5) == 8", "candidate(90) == 4660046610375530309"),
    ),
    _problem(
        *(3, "splice", "a: List[int], b: List[int]", "The lists in turn, then the rest of the longer one."),
        "    both = [each for pair in zip(a, b) for each in pair]\n    k = min(len(a), len(b))\n"
        "    return both + a[k:] + b[k:]\n",
        *("candidate([1, 3, 5], [2]) == [1, 2, 3, 5]", "candidate([], [4]) == [4]"),
    ),
    _problem(
        *(4, "mean_length", "words: List[str]", "The mean length of the words, 0 without words."),
        "    return sum(map(len, words)) / len(words) if words else 0.0\n",
        *("abs(candidate(['ab', 'abc']) - 2.5) < 1e-9", "candidate([]) == 0"),
    ),
]
MBPP = [
    {
        "task_id": 1,
        "text": "Write a function to double a number.",
        "code": "def double(x):\n    return 2 * x\n",
        "test_setup_code": "",
        "test_list": ["assert double(4) == 8", "assert double(-1) == -2"],
    },
    {
        "task_id": 2,
        "text": "Write a function to add the ends of two ropes.",
        "code": "import math\nclass Rope:\n    def __init__(self, a):\n        self.a = a\n"
        "def sum(x, y):\n    return x.a + y.a\n",
        "test_setup_code": "one = Rope(1)\none.a = 5",
        "test_list": ["assert sum(one, Rope(2)) == 7", "assert math.isclose(sum(one, one), 10)"],
    },
]


def write_problems(path: Path, problems: list[dict[str, Any]] = PROBLEMS) -> Path:
    """Writes a file of problems, gzipped if its name says so."""
    data = "".join(json.dumps(each) + "\n" for each in problems).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def broken(solution: str) -> str:
    """The solution whose last `return` gives None."""
    lines = solution.rstrip("\n").split("\n")
    last = max(number for number, line in enumerate(lines) if line.strip().startswith("return"))
    lines[last] = lines[last][: lines[last].index("return")] + "return None"
    return "\n".join([*lines, ""])
