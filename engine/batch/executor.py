"""The one interface between the engine's loop and whatever computes tokens."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.cannot_do import CannotDo as CannotDo
from engine.batch.grammars import Grammars
from engine.models.spec import VisionSpec

if TYPE_CHECKING:
    from socket import socket

    from engine.batch.weight_transfer import WeightTransfer
    from engine.distributed.engines import EngineGroup
    from engine.distributed.spec import GroupSpec
    from engine.lora.store import AdapterStore
    from engine.models.parallel.balance import ExpertBalance


class ExecutorInfo(msgspec.Struct, frozen=True):
    """What an executor found out while it loaded the model and sized its KV cache."""

    num_kv_blocks: int
    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str
    pools: bool = False
    """Whether sequences get one vector each instead of tokens."""
    task: str = "generate"
    """What the model is for: generate, or embed, or classify."""
    in_one_step: bool = False
    """Whether all tokens of a sequence have to be computed in the same step."""
    has_kv: bool = True
    """False: nothing is kept of a sequence; `num_kv_blocks` then counts sequences."""
    cache_windows: tuple[int | None, ...] = (None,)
    """For each group of layers with KV blocks of its own, how far back its tokens attend."""
    num_stages: int = 1
    """Steps that are computed at once, each in another part of the model."""
    is_batch_invariant: bool = False
    """Whether no token depends on what shares its step."""
    row_price: float = 0.0
    """What one more token costs in a step, as a part of a step of one token."""
    draft_price: float = 0.0
    """What a draft model or head costs for one token, as a part of the same."""
    vision: VisionSpec | None = None
    """What encodes images; None where they are refused."""
    embedding_bytes: int = 0
    """What the executor keeps for one token of an image."""

    def check_unchanged(self, fingerprint: str) -> None:
        """Compare a model that was loaded again with this one.

        Raises:
            CannotDo: they differ.
        """
        if fingerprint != self.model_fingerprint:
            raise CannotDo("the model's weights have changed: the engine has to be restarted")


class PendingResult(Protocol):
    """A step that was submitted and may still be running."""

    def result(self) -> BatchResult:
        """Wait for the step; raises whatever went wrong in it."""


class Executor(ABC):
    """Runs batch plans in the order in which they are submitted."""

    info: ExecutorInfo
    """What was found while loading."""
    grammars: Grammars | None = None
    """What makes draws follow the grammars of requests; None where it cannot."""
    adapters: "AdapterStore[Any] | None" = None
    """The adapters that plans may put into slots; None where there are none."""

    @abstractmethod
    def submit(self, plan: BatchPlan) -> PendingResult:
        """Start a step. Plans arrive in order; each may refer to tokens of the one before."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Free memory until `wake_up`; no step may be in flight, and none may follow.

        Level 1 frees the KV cache and keeps the weights where they are quick to have again, level
        2 frees the weights too. Sleeping again, or deeper, is allowed.
        """

    @abstractmethod
    def wake_up(self, *, kv_cache: bool = True) -> None:
        """Be ready for steps again, with an empty KV cache and no slot in use; idempotent.

        Without `kv_cache` only the weights are there again, and no step may follow.

        Raises:
            CannotDo: the weights are gone or have changed; it stays asleep.
        """

    def load_weights(self, model: str, revision: str | None) -> None:
        """Compute with a checkpoint of the same shape from now on, with an empty KV cache.

        No step may be in flight. `info` has its fingerprint afterwards. The weights before stay
        until `settle_weights`.

        Raises:
            CannotDo: it cannot be loaded here; everything is as it was.
        """
        raise CannotDo("weights are replaced in engines that generate only")

    def weight_transfer(self) -> "WeightTransfer":
        """Return what receives weights of a trainer for `take_weights`.

        Raises:
            CannotDo: this executor's weights cannot be replaced so.
        """
        raise CannotDo("weights are replaced in engines that generate only")

    def take_weights(self) -> None:
        """Compute with what a trainer has sent, otherwise as `load_weights`."""
        self.weight_transfer()

    def settle_weights(self, *, back: bool) -> None:
        """Give up the weights that were replaced last, or have them `back` with an empty KV cache.

        To give up what is not there is allowed.

        Raises:
            CannotDo: they are not there.
        """
        if back:
            raise CannotDo("the weights before are not there any more")

    def start_profile(self) -> None:
        """Begin to record what steps do.

        Raises:
            CannotDo: this executor has nothing to record, or does so already.
        """
        raise CannotDo("this engine has nothing to profile")

    def stop_profile(self, path: Path) -> None:
        """End the recording and write its trace; the directory is made if it is not there.

        Raises:
            CannotDo: nothing is being recorded.
            OSError: the trace cannot be written.
        """
        raise CannotDo("this engine has nothing to profile")

    @abstractmethod
    def shutdown(self) -> None:
        """Release the device and any worker processes; idempotent."""


class GroupExecutor(Executor):
    """An executor whose steps hold collectives with other engines.

    It is made for the place that it will probably have. No step may be in flight when it is
    moved to another; steps need a group, and raise `GroupBroken` when that fails.
    """

    expert_balance: "ExpertBalance | None" = None
    """What is known of the experts' load; None if it is not measured."""

    @abstractmethod
    def prepare_group(self, position: int, size: int) -> None:
        """Load what an engine at this place of a group of `size` holds, and free the rest.

        The KV cache and what slots know stay as they are.

        Raises:
            CannotDo: the model was loaded whole, or has no experts.
        """

    @abstractmethod
    def join_group(self, spec: "GroupSpec", listener: "socket | None") -> "EngineGroup":
        """Meet the other engines and take steps with them from now on.

        The place among the engines has been prepared. At rank 0 they meet at the listener.

        Raises:
            GroupBroken: not everybody came.
        """
