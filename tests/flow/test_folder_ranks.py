"""`evaluate` of a model folder in the processes of a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time, types
from pathlib import Path
from ropewalk.base.errors import RopewalkError, UserError
from ropewalk.config.ranks import ranks
from ropewalk.flow import evaluate_folder

def asks(path, **given):
    if ranks().rank == 0:
        raise UserError("the judge needs a key")
    time.sleep(60)  # as in a collective

evaluate_folder._module = lambda: types.SimpleNamespace(evaluate_folder=asks)
try:
    evaluate_folder.measure_folder(Path("model"), [], runs=Path("."), out=Path("out"))
except RopewalkError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_when_rank_0_cannot_measure_the_other_ranks_end_too(tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29544"}
    ranks = []
    for rank in range(2):
        place = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "one"}
        place["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-c", PROGRAM]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=place, stderr=subprocess.PIPE, text=True))
    told = [rank.communicate(timeout=30)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert all("the judge needs a key" in each for each in told)
