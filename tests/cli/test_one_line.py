"""What a user, a disk or a stranger can cause is told in one line; the traceback is in a file that the line names."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from ropewalk.base.blame import explain
from ropewalk.cli import main as command_line

from .conftest import Call, Ended

ROOT = Path(__file__).parent.parent.parent


def told(ended: Ended) -> str:
    """The one line of an error, checked."""
    assert ended.status == 2, ended.err
    assert "Traceback" not in ended.err
    (line,) = [line for line in ended.err.splitlines() if "traceback: " in line]
    (name,) = re.findall(r"\(traceback: (.*?);", line)
    assert "Traceback (most recent call last)" in Path(name).read_text()
    Path(name).unlink()
    return line


def test_a_folder_of_the_system_is_named_with_a_remedy(tiny: Path, call: Call) -> None:
    line = told(call("new", "/proc/x.toml", "corpus"))
    assert line.startswith("/proc/x.toml.partial: No such file or directory; check the name")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tiny: Path, call: Call) -> None:
    (tiny / "closed").mkdir(mode=0o500)
    ended = call("prepare", "tiny.toml", "prepare.folder=closed/x")
    assert ended.status == 2
    assert "Permission denied" in ended.err
    assert "Traceback" not in ended.err


FAMILIES = {
    "arrow": "import pyarrow as pa; pa.ipc.open_file(pa.py_buffer(b'x' * 100))",
    "json": "import json; json.loads('{')",
    "depth": "import json; json.loads('[' * 100_000)",
    "text": "b'\\xff'.decode()",
    "memory": "import resource as r, lzma; r.setrlimit(r.RLIMIT_AS, (400 << 20, -1)); lzma.compress(b'', preset=9)",
    "memory of torch": "import torch; torch.empty(1 << 50)",
    "files": "open('/nowhere/at/all')",
}
CHILD = """
import sys
from pathlib import Path
from ropewalk.cli import main as command_line
def app(args, standalone_mode):
    path = Path("some/file")
    exec(args[0])
command_line.app = app
command_line.main(sys.argv[1:])
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_one_line_and_exit_2(family: str) -> None:
    command = [sys.executable, "-c", CHILD, FAMILIES[family]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "TMPDIR": ""})
    line = told(Ended(done.returncode, done.stdout, done.stderr))
    family = "memory" if family == "memory of torch" else family
    expected = {"files": "/nowhere/at/all: No such file", "memory": "out of memory", "depth": "nested too deeply"}
    assert expected.get(family, family if family != "text" else "UTF-8").lower() in line.lower()


def test_what_ends_a_run_leaves_its_traceback_in_the_run(
    tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object, **__: object) -> None:
        pa.ipc.open_file(pa.py_buffer(b"x" * 100))

    monkeypatch.setattr("ropewalk.flow.prepare_stage.prepare", prepare)
    line = told(call("prepare", "tiny.toml"))
    assert "damaged or foreign Arrow data" in line
    assert "runs/tiny/ropewalk-traceback-" in line


def test_a_bug_keeps_its_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def app(args: list[str], standalone_mode: bool) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(command_line, "app", app)
    with pytest.raises(KeyError, match="a bug"):
        call("run")
    assert explain(ValueError("a bug")) is None
    assert explain(OSError("without a number")) is None


def test_the_line_names_file_and_remedy() -> None:
    assert "full" in str(explain(OSError(errno.ENOSPC, "No space left on device", "x")))
    assert "ulimit -n" in str(explain(OSError(errno.EMFILE, "Too many open files")))
    assert "ulimit -v" in str(explain(MemoryError()))
    with pytest.raises(pa.ArrowInvalid) as caught:
        pa.ipc.open_file(pa.py_buffer(b"x" * 50))
    assert "Arrow" in str(explain(caught.value))
    assert len(str(explain(caught.value)).splitlines()) == 1


WORKER = """
import sys
from ropewalk.train import __main__ as worker
def work(*arguments, **settings):
    import json
    json.loads("{")
worker._work = work
sys.exit(worker.main(sys.argv[1:]))
"""


def test_the_worker_of_train_tells_one_line_and_keeps_the_traceback_in_its_run(trained: Path) -> None:
    run = trained / "runs/tiny"
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(run)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    line = told(Ended(done.returncode, done.stdout, done.stderr))
    assert f"(traceback: {run}/ropewalk-traceback-" in line
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["error"]) == ("failed", "JSONDecodeError")
