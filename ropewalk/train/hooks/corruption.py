"""Silent data corruption: the same work computed twice must give the same bits.

Fleets find about one such core in a thousand machines (Hochschild et al. 2021, Dixit et al. 2021). Checksums of files
do not see them: what is wrong is computed, then stored faithfully. Replicas hold the same weights and apply the same
update, so their updates are compared; within one process there is nothing to compare with but the process itself, so a
microbatch is computed twice. That finds a core that errs now and then, not one that errs the same way each time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropewalk.base.errors import HardwareError
from ropewalk.load.batch import Batch
from ropewalk.parallel.compat import deterministic
from ropewalk.parallel.executor import Executor, bit_sum

from .hook import Hook

if TYPE_CHECKING:
    from ..training_run import TrainingRun


class CorruptionProbe(Hook):
    """Compares bits before every so many steps."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps

    def before_forward(self, run: TrainingRun, batch: Batch) -> None:
        step = run.step + 1
        if not self._every_steps or step % self._every_steps:
            return
        start = time.perf_counter()
        with run.during("probe"), deterministic(run.device):
            probe(run.executor, batch, step=step)
        run.events.write("probed", step=step, seconds=time.perf_counter() - start)


def probe(executor: Executor, batch: Batch, *, step: int) -> None:
    """Raises HardwareError when the microbatch of `step` does not repeat, or the weights of replicas differ.

    All ranks must call. Nothing of the executor changes.
    """
    first, second = executor.digest(batch), executor.digest(batch)
    if first != second:
        raise HardwareError(
            f"step {step}: the same microbatch computed twice gave other bits ({first:#x}, {second:#x}); this machine "
            "computes wrongly. Test its memory and processor; the same command continues from the last checkpoint"
        )
    group = executor.replicas
    weights = bit_sum(part.local for part in executor.model_state().values())
    wrong = [group.ranks[place] for place in disagreeing(group.gather_numbers(weights, device=executor.device))]
    if wrong:
        raise HardwareError(
            f"step {step}: the weights of ranks {', '.join(map(str, wrong))} are not those of the other replicas; "
            "take these machines out. The same command continues from the last checkpoint"
        )


def disagreeing(hashes: Sequence[int]) -> list[int]:
    """The ranks whose hash is not the most frequent one; both of two that disagree."""
    counts = Counter(hashes).most_common()
    if len(counts) == 1:
        return []
    tied = counts[0][1] == counts[1][1]
    return [rank for rank, value in enumerate(hashes) if tied or value != counts[0][0]]
