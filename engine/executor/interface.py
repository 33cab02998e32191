"""The one interface between the engine's loop and whatever computes tokens."""

from typing import Protocol

import msgspec

from engine.scheduler.batch import BatchPlan, BatchResult


class ExecutorInfo(msgspec.Struct, frozen=True):
    """What an executor found out while it loaded the model and sized its KV cache."""

    num_kv_blocks: int
    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str


class PendingResult(Protocol):
    """A step that was submitted and may still be running."""

    def result(self) -> BatchResult:
        """Wait for the step; raises whatever went wrong in it."""
        ...


class Executor(Protocol):
    """Runs batch plans in the order in which they are submitted."""

    @property
    def info(self) -> ExecutorInfo: ...

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Start a step. Plans arrive in order; each may refer to tokens of the one before."""
        ...

    def shutdown(self) -> None:
        """Release the device and any worker processes; idempotent."""
        ...
