"""The interface of executors, which compute the steps that the engine plans."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.batch import CannotDo as CannotDo
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
    """Properties of an executor, known after loading the model and sizing its KV cache."""

    num_kv_blocks: int
    max_model_len: int
    """Maximum sequence length in tokens, prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str
    task: str = "generate"
    """Task of the model: generate, embed or classify."""
    in_one_step: bool = False
    """Whether all tokens of a sequence must be computed in the same step."""
    has_kv: bool = True
    """If False, sequences keep no KV state, and `num_kv_blocks` counts sequences."""
    cache_windows: tuple[int | None, ...] = (None,)
    """Attention window of each layer group with its own KV blocks; None if unlimited."""
    num_stages: int = 1
    """Number of pipeline stages: steps computed concurrently."""
    is_batch_invariant: bool = False
    """Whether tokens are independent of other sequences in their step."""
    row_price: float = 0.0
    """Cost of each additional token in a step, relative to a step of one token."""
    draft_price: float = 0.0
    """Cost of one token of a draft model or head, relative to a step of one token."""
    vision: VisionSpec | None = None
    """Spec of the image encoder; None if images are refused."""
    embedding_bytes: int = 0
    """Bytes of one image token's embedding."""

    @property
    def pools(self) -> bool:
        """Whether sequences produce vectors instead of tokens."""
        return self.task != "generate"

    def check_unchanged(self, fingerprint: str) -> None:
        """Check that a reloaded model is the same.

        Raises:
            CannotDo: they differ.
        """
        if fingerprint != self.model_fingerprint:
            raise CannotDo("the model's weights have changed: restart the engine")


class PendingResult(Protocol):
    """A submitted step that may still be running."""

    def result(self) -> BatchResult:
        """Wait for the step and return its result; raises its error."""


class Executor(ABC):
    """Runs batch plans in order of submission."""

    info: ExecutorInfo
    """Properties known after loading."""
    grammars: Grammars | None = None
    """Applies requests' grammars to sampling; None if unsupported."""
    adapters: "AdapterStore[Any] | None" = None
    """Adapters that plans can place in slots; None if there are none."""

    @abstractmethod
    def submit(self, plan: BatchPlan) -> PendingResult:
        """Start a step. Plans arrive in order; each can refer to tokens of the previous one."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Free memory until `wake_up`; no step may be in flight, and none may follow.

        Level 1 frees the KV cache and keeps the weights quickly available; level 2 frees the
        weights too. Sleeping again, or deeper, is allowed.
        """

    @abstractmethod
    def wake_up(self, *, kv_cache: bool = True) -> None:
        """Prepare for steps again, with an empty KV cache and no slot in use; idempotent.

        Without `kv_cache` only the weights are restored, and no step may follow.

        Raises:
            CannotDo: the weights are gone or have changed; it stays asleep.
        """

    def load_weights(self, model: str, revision: str | None) -> None:
        """Switch to another checkpoint of the same architecture, with an empty KV cache.

        No step may be in flight. Afterwards `info` has the new fingerprint. The previous weights
        are kept until `settle_weights`.

        Raises:
            CannotDo: it cannot be loaded; nothing has changed.
        """
        raise CannotDo("only engines that generate text can replace weights")

    def weight_transfer(self) -> "WeightTransfer":
        """Return the receiver of a trainer's weights for `take_weights`.

        Raises:
            CannotDo: this executor's weights cannot be replaced that way.
        """
        raise CannotDo("only engines that generate text can replace weights")

    def take_weights(self) -> None:
        """Switch to the weights that a trainer has sent; otherwise as `load_weights`."""
        self.weight_transfer()

    def settle_weights(self, *, revert: bool) -> None:
        """Free the previous weights, or with `revert` switch back to them with an empty KV cache.

        Freeing is allowed even if there are none.

        Raises:
            CannotDo: there are none to switch back to.
        """
        if revert:
            raise CannotDo("the previous weights are no longer available")

    def start_profile(self) -> None:
        """Start recording a profile of the steps.

        Raises:
            CannotDo: there is nothing to record, or a profile is already being recorded.
        """
        raise CannotDo("this engine has nothing to profile")

    def stop_profile(self, path: Path) -> None:
        """Stop recording and write the trace; the directory is created if missing.

        Raises:
            CannotDo: no profile is being recorded.
            OSError: the trace cannot be written.
        """
        raise CannotDo("this engine has nothing to profile")

    @abstractmethod
    def shutdown(self) -> None:
        """Release the device and any worker processes; idempotent."""


class GroupExecutor(Executor):
    """An executor whose steps run collectives with other engines.

    It is created for its expected position. No step may be in flight when the position changes;
    steps require a group, and raise `GroupBroken` when it fails.
    """

    expert_balance: "ExpertBalance | None" = None
    """Measured load of the experts; None if not measured."""

    @abstractmethod
    def prepare_group(self, position: int, size: int) -> None:
        """Load the experts for this position in a group of `size`, and free the rest.

        The KV cache and slot state are unchanged.

        Raises:
            CannotDo: the model was loaded whole, or has no experts.
        """

    @abstractmethod
    def join_group(self, spec: "GroupSpec", listener: "socket | None") -> "EngineGroup":
        """Connect to the other engines and take steps with them from now on.

        The position must have been prepared. Rank 0 accepts connections on the listener.

        Raises:
            GroupBroken: not all engines connected.
        """
