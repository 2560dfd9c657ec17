"""One rank of `doctor cluster`: runs the steps of the check in order, each with a timeout.

The main thread exchanges messages with the other ranks (`Control`); a second thread measures. A measurement that never
returns because another rank does not take part therefore does not block the check: rank 0 sees which ranks started and
finished a step, stops all ranks, and returns what was measured so far.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ropewalk.base.errors import PeerFailed, UserError
from ropewalk.base.files import point
from ropewalk.base.progress import Progress, Silent
from ropewalk.config.ranks import Ranks
from ropewalk.parallel.mesh import Mesh, join, leave, pick_device

from ..measure.ceilings import matmul_flops
from . import network, storage
from .brief import Brief
from .control import LOOK_EVERY_S, Control
from .facts import facts, presence

SETTLE_S = 2.0
"""Wait after the first error of a step for errors of other ranks: a consequence may arrive before its cause."""
GOODBYE_S = 3.0
LATE_S = 30.0
"""Time that the other ranks wait for rank 0 beyond a step's timeout."""


class Examination:
    """One rank of the check. `run` returns the table of all ranks on rank 0, and an empty one elsewhere."""

    def __init__(self, place: Ranks, *, timeout_s: float, progress: Progress | None = None) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._progress = progress or Silent()
        self._terminated = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.stuck = False
        """Whether a measurement never returned: such a process must end by `os._exit`."""
        self._control = Control(place, timeout_s=timeout_s)
        self._device = torch.device("cpu")
        self._mesh: Mesh | None = None
        self._folder = Path()
        self._brief: Brief
        self._own_error = ""
        self._refusal: UserError | None = None
        self._planned: list[str] = []
        self._steps: dict[str, Any] = {}

    def run(self, locate: Callable[[], Path], make_brief: Callable[[], Brief]) -> dict[str, Any]:
        """Checks what rank 0's `make_brief` asks for, and the storage of the run directory that `locate` gives on each
        rank. All ranks must call; a UserError on rank 0 ends all of them."""
        self._listen()
        threading.Thread(target=self._measure, name="measure", daemon=True).start()
        try:
            self._locate(locate)
            whole = self._step("ranks", self._arrive) and self._agree(make_brief) and self._all_steps()
        except torch.distributed.DistError as error:
            raise PeerFailed(f"rank {self._place.rank} lost the connection to rank 0: {error}", 1) from None
        finally:
            self._leave()
        if self._place.rank > 0:
            return {}
        return {
            "world": self._place.world,
            "timeout_s": self._timeout_s,
            "launcher": self._place.launcher,
            "brief": self._brief.tree() if hasattr(self, "_brief") else None,
            "whole": whole,
            "terminated": self._terminated,
            "not_reached": [name for name in self._planned if name not in self._steps and name != "leave"],
            "steps": self._steps,
        }

    def _leave(self) -> None:
        """Rank 0, which usually hosts the message store, ends after the others have read the last message."""
        if self._place.rank > 0:
            with contextlib.suppress(torch.distributed.DistError):
                self._control.post(f"bye.{self._place.rank}", True)
            return
        storage.remove(self._folder, self._control)
        deadline = time.monotonic() + GOODBYE_S
        came = self._steps.get("ranks", {"values": {}})["values"]
        for rank in sorted(int(rank) for rank in came if rank != "0"):
            self._control.wait(f"bye.{rank}", timeout_s=deadline - time.monotonic())

    def _all_steps(self) -> bool:
        brief, control = self._brief, self._control
        hosts = brief_hosts(control)
        measures = hosts.index(hosts[self._place.rank]) == self._place.rank
        steps: list[tuple[str, Callable[[], Any]]] = [
            ("facts", lambda: facts(self._place, device=brief.device)),
            ("matmul", self._matmul),
            (
                "storage",
                lambda: storage.probe_folder(
                    self._folder, control, seconds=brief.seconds, timeout_s=self._timeout_s, measures=measures
                ),
            ),
        ]
        if brief.plan.world > 1:
            steps += [
                ("process group", self._join),
                ("clocks", lambda: network.clock_offset(self._made_mesh.control)),
                ("control", self._measure_control),
                *((f"axis {axis}", lambda axis=axis: self._measure_axis(axis)) for axis in network.axis_kinds(brief)),
                ("ring", self._measure_ring),
                ("leave", leave),
            ]
        self._planned = [name for name, _ in steps]
        return all(self._step(name, work) for name, work in steps)

    def _locate(self, locate: Callable[[], Path]) -> None:
        try:
            self._folder = locate()
        except UserError as error:
            self._refusal = error
            if self._place.rank == 0:
                self._control.post("then.ranks", {"refused": str(error)})
                raise

    def _agree(self, make_brief: Callable[[], Brief]) -> bool:
        """Sends rank 0's brief, or its error, to all ranks."""
        if self._place.rank == 0:
            self._control.post(
                "hosts", [self._steps["ranks"]["values"][str(r)]["host"] for r in range(self._place.world)]
            )
            try:
                self._brief = make_brief()
            except UserError as error:
                self._control.post("brief", {"error": str(error)})
                raise
            self._control.post("brief", {"brief": self._brief.tree()})
            return True
        told = self._control.wait("brief", timeout_s=self._timeout_s + LATE_S, ended=lambda: self._terminated)
        if told is None:
            raise PeerFailed(f"rank 0 sent no plan within {self._timeout_s + LATE_S:.0f} s", 1)
        if "error" in told:
            raise PeerFailed(f"rank 0: {told['error']}", UserError.exit_code)
        self._brief = Brief(**told["brief"])
        return True

    def _step(self, name: str, work: Callable[[], Any]) -> bool:
        """Runs one step on this rank and waits for the others; whether all continue."""
        if self._place.rank == 0:
            self._progress.say(f"checking {name}")
        ended = threading.Event()
        self._work.put(lambda: self._do(name, work, ended))
        continues = self._collect(name) if self._place.rank == 0 else self._receive_decision(name)
        # After an error on another rank this one may wait for a message that never arrives.
        self.stuck = not ended.wait(1.0 if not continues else self._timeout_s)
        if continues and self._own_error:
            raise UserError(f"rank {self._place.rank}: {self._own_error}")
        return continues and not self.stuck

    def _do(self, name: str, work: Callable[[], Any], ended: threading.Event) -> None:
        """Runs in the measuring thread."""
        rank = self._place.rank
        try:
            point(f"cluster.step:{name}")
            self._control.post(f"begun.{name}.{rank}", True)
            answer = {"value": work()}
        except Exception as error:
            self._own_error = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            answer = {"error": self._own_error, "host": socket.gethostname()}
        finally:
            ended.set()
        self._control.post(f"ended.{name}.{rank}", answer)

    def _measure(self) -> None:
        while work := self._work.get():
            work()

    def _collect(self, name: str) -> bool:
        """Rank 0: collects the ranks' answers until the timeout; tells all ranks whether to continue."""
        start, world = time.monotonic(), self._place.world
        deadline, waiting = start + self._timeout_s, set(range(world))
        answers: dict[int, Any] = {}
        while waiting and time.monotonic() < deadline and not self._terminated:
            for rank in sorted(waiting):
                if (answer := self._control.read(f"ended.{name}.{rank}")) is not None:
                    answers[rank] = answer
                    waiting.discard(rank)
                    if "error" in answer:
                        deadline = min(deadline, time.monotonic() + SETTLE_S)
            time.sleep(LOOK_EVERY_S if waiting else 0)
        errors = {str(rank): answer["error"] for rank, answer in sorted(answers.items()) if "error" in answer}
        errors |= self._duplicates() if name == "ranks" else {}
        begun = [rank for rank in sorted(waiting) if self._control.read(f"begun.{name}.{rank}")]
        self._steps[name] = {
            "values": {str(rank): answer["value"] for rank, answer in sorted(answers.items()) if "value" in answer},
            "errors": errors,
            "error_hosts": {str(rank): answer["host"] for rank, answer in answers.items() if "error" in answer},
            "not_begun": [rank for rank in sorted(waiting) if rank not in begun],
            "not_ended": begun,
            "seconds": round(time.monotonic() - start, 3),
        }
        continues = not waiting and not errors
        self._control.post(f"then.{name}", "go" if continues else "stop")
        return continues

    def _duplicates(self) -> dict[str, str]:
        """Ranks claimed by several processes; the first answer of each looks valid."""
        counts = {rank: self._control.read(f"came.{rank}") or 0 for rank in range(self._place.world)}
        return {
            str(rank): f"{count} processes have rank {rank}; start every rank once"
            for rank, count in counts.items()
            if count > 1
        }

    def _receive_decision(self, name: str) -> bool:
        """Other ranks: receives rank 0's decision after a step."""
        limit = self._timeout_s + LATE_S
        told = self._control.wait(f"then.{name}", timeout_s=limit, ended=lambda: self._terminated)
        if told is None and not self._terminated:
            raise PeerFailed(
                f"no message from rank 0 within {limit:.0f} s after the step `{name}`; is it still running?", 1
            )
        if isinstance(told, dict):
            raise PeerFailed(f"rank 0: {told['refused']}", UserError.exit_code)
        return bool(told == "go")

    def _listen(self) -> None:
        """A launcher ends all ranks when one fails; rank 0 then reports what it knows before it ends. Signals need the
        main thread."""

        def note(number: int, frame: Any) -> None:
            self._terminated = True

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, note)

    # The steps, in the measuring thread.

    def _arrive(self) -> dict[str, Any]:
        if self._control.count(f"came.{self._place.rank}") > 1:
            raise UserError("another process also has this rank; start every rank once")
        if self._refusal:
            raise self._refusal
        return presence(self._place)

    def _matmul(self) -> dict[str, float]:
        plan = self._brief.plan
        self._device = pick_device(plan, self._place)
        if self._device.type == "cuda":
            count = torch.cuda.device_count()
            if self._place.local_rank >= count:
                raise UserError(
                    f"LOCAL_RANK is {self._place.local_rank}, but torch sees {count} GPUs; start at most {count} ranks "
                    "on this host, or check CUDA_VISIBLE_DEVICES"
                )
            torch.cuda.set_device(self._device)
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        return {"flops": matmul_flops(self._device, dtype)}

    def _join(self) -> dict[str, str]:
        join(self._brief.plan, self._place, timeout_s=self._timeout_s, store=self._control.connect())
        self._mesh = Mesh(self._brief.plan, self._place.rank)
        network.connect(self._mesh, self._brief, self._device)
        return {"backend": torch.distributed.get_backend()}

    @property
    def _made_mesh(self) -> Mesh:
        assert self._mesh, "join comes first"
        return self._mesh

    def _measure_control(self) -> dict[str, Any]:
        host = torch.device("cpu")
        return network.measure_group(self._made_mesh.control, "all_reduce", device=host, seconds=self._brief.seconds)

    def _measure_axis(self, axis: Any) -> dict[str, Any]:
        group, kind = self._made_mesh.group(axis), network.axis_kinds(self._brief)[axis]
        return network.measure_group(group, kind, device=self._device, seconds=self._brief.seconds)

    def _measure_ring(self) -> dict[str, Any]:
        return network.measure_group(self._made_mesh.world, "send", device=self._device, seconds=self._brief.seconds)


def brief_hosts(control: Control) -> list[str]:
    """The host of every rank, as sent by rank 0."""
    return list(control.read("hosts"))
