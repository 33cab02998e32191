"""Makes some prompts kill every simulated engine that computes them, as a bug in a kernel would.

Processes whose PYTHONPATH begins with this folder import this module when they start.
"""

import os
import signal

from engine.batch.batch import BatchPlan
from engine.batch.executor import PendingResult
from engine.executor.simulated import SimulatedExecutor

KILLER = [7, 11, 7, 11]

_submit = SimulatedExecutor.submit


def _submit_or_die(self: SimulatedExecutor, plan: BatchPlan) -> PendingResult:
    if any(start.token_ids[: len(KILLER)] == KILLER for start in plan.starting):
        os.kill(os.getpid(), signal.SIGSEGV)
    return _submit(self, plan)


SimulatedExecutor.submit = _submit_or_die  # type: ignore[method-assign]
