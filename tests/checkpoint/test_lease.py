"""What somebody reads is not pruned meanwhile, and a reader that died keeps nothing."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.policy.retention import prune, retain, retire
from ropewalk.checkpoint.read.model_check import verify_model
from ropewalk.checkpoint.write.save import save
from ropewalk.flow import export_model, generate, reshard_checkpoint
from tests.checkpoint.test_hostile import state

_then: Callable[[], None] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """Prunes at the moment at which a reader opens the weights."""
    global _then
    if event == "open" and _then is not None and str(args[0]).endswith("step-00000005/model.safetensors"):
        work, _then = _then, None
        work()


sys.addaudithook(_hook)


def two(folder: Path) -> Path:
    """A run with checkpoints of steps 5 and 6; the path of the first."""
    for step in (5, 6):
        path = save(folder / "checkpoints", dataclasses.replace(state(), step=step))
    return path.with_name("step-00000005")


READERS: dict[str, Callable[[Path, Path], object]] = {
    "export": lambda path, out: export_model(path, out),
    "generate": lambda path, out: "".join(generate(path, prompt="a", tokens=2)),
    "reshard": lambda path, out: reshard_checkpoint(path, out, ranks=2),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_run_that_prunes_while_its_checkpoint_is_read(tmp_path: Path, reader: str) -> None:
    global _then
    path, went = two(tmp_path), []

    def pruning() -> None:
        went.append(retain(path.parent, keep_last=1, keep_verified=0))

    _then = pruning
    READERS[reader](path, tmp_path / "out")
    assert went == [[]]
    assert retain(path.parent, keep_last=1, keep_verified=0) == [path]


def test_a_lease_keeps_one_checkpoint_from_prune_which_says_so(tmp_path: Path) -> None:
    path = two(tmp_path)
    with leased(path) as held, leased(tmp_path) as newest:
        assert (held, newest) == (path, path.with_name("step-00000006"))
        done = prune(path.parent, keep_last=1)
        assert (done.gone, done.in_use) == ((), (path,))
    assert prune(path.parent, keep_last=1).gone == (path,)
    assert list_checkpoints(path.parent) == [newest]
    assert verify_model(newest) == []


def test_the_lease_of_a_process_that_was_killed_is_over(tmp_path: Path) -> None:
    path = two(tmp_path)
    code = "import time; from pathlib import Path; from ropewalk.checkpoint.policy.lease import leased\n"
    code += f"with leased(Path({str(path)!r})): print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    try:
        assert child.stdout
        assert child.stdout.readline().strip() == b"1"
        assert retain(path.parent, keep_last=1, keep_verified=0) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert retain(path.parent, keep_last=1, keep_verified=0) == [path]


def test_what_was_deleted_between_finding_and_locking_is_looked_for_again(tmp_path: Path) -> None:
    path = two(tmp_path)
    newest = path.with_name("step-00000006")
    (newest / "manifest.json").unlink()
    assert retire(newest, disk=LocalDisk())  # without a manifest nobody can read it
    with leased(tmp_path) as found:
        assert found == path
