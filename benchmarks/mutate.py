"""Keys of the recipe made without effect, one after the other: do the tests notice?

    python benchmarks/mutate.py --count 20 --seed 25

Draws keys, and for each runs the test in which its value should matter, in a process where whoever asks for the key
gets its default (tests/wiring/ignored.py): the recipe still holds the value, checks accept it, files show it. A
mutation that no test notices is a setting that may do nothing. `--key train.clip_norm` takes that key; `--named` breaks
what is no setting, as tests/wiring/broken.py lists it. Prints a table, and JSON in the last line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.wiring.broken import BROKEN  # noqa: E402
from tests.wiring.rows import keys_of  # noqa: E402
from tests.wiring.table import ROWS  # noqa: E402

TIMEOUT_S = 600


def keys(count: int, seed: int) -> list[str]:
    """Keys with a row and a default, drawn by the seed."""
    defaults = {key for key, field in keys_of() if field.default is not dataclasses.MISSING}
    names = sorted({row.name for row in ROWS} & defaults)
    return random.Random(seed).sample(names, min(count, len(names)))


def run_key(key: str) -> dict[str, Any]:
    """What the tests say of a key that has no effect."""
    (row,) = [row for row in ROWS if row.name == key]
    test = f"tests/test_recipe_keys.py::test_another_value_makes_a_difference[{row.key}]"
    return {"mutation": key, **run_tests(test, "-p", "tests.wiring.ignored", "--ignore-key", key)}


def run_named(name: str) -> dict[str, Any]:
    """What the test that should notice says of a broken mechanism."""
    tests = BROKEN[name].test.split()
    return {"mutation": name, **run_tests(*tests, "-p", "tests.wiring.broken", "--break", name)}


def run_tests(*arguments: str) -> dict[str, Any]:
    """Whether a test failed, and which first. Tests that do not run are no proof: they are an error."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "slow or not slow", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    began = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"outcome": "caught", "by": f"no end within {TIMEOUT_S} s", "seconds": TIMEOUT_S}
    seconds = round(time.perf_counter() - began, 1)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {"outcome": "caught" if failed else "survived", "by": failed[1] if failed else "", "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="how many keys are drawn")
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--key", action="append", default=[], help="this key instead of drawn ones; may be repeated")
    parser.add_argument("--named", action="store_true", help="the broken mechanisms instead of keys")
    parser.add_argument("--quick", action="store_true", help="three keys")
    options = parser.parse_args()
    found = []
    names = (
        sorted(BROKEN) if options.named else options.key or keys(3 if options.quick else options.count, options.seed)
    )
    for name in names:
        found.append(run_named(name) if options.named else run_key(name))
        last = found[-1]
        print(f"{last['outcome']:9} {last['mutation']:52} {last['seconds']:6} s  {last['by']}", flush=True)
    caught = sum(one["outcome"] == "caught" for one in found)
    print(f"{caught} of {len(found)} caught")
    print(json.dumps({"name": "mutate", "seed": options.seed, "caught": caught, "mutations": found}))
    sys.exit(caught < len(found))


if __name__ == "__main__":
    main()
