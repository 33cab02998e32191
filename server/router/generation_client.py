"""What the HTTP layer needs from whatever reaches the engines; tests give it a fake."""

from typing import Protocol

from engine.shared.messages import (
    AdapterOutcome,
    ClusterView,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    UtilityResult,
    UtilityValue,
)
from server.router.adapters import Adapters
from server.router.engine_times import EngineTimes


class NoEngineAvailable(Exception):
    """No engine can serve now; the client may try again later (HTTP 503)."""


class NoSuchEngine(NoEngineAvailable):
    """The wished engine is none of those that there are or will be (HTTP 400)."""


class ReaderTooSlow(Exception):
    """Too much had been generated for a client that does not read it; the request was aborted."""


class KillsEngines(Exception):
    """The request ended the engines that computed it, or may have: it must not be sent again."""


class TokenStream(Protocol):
    """The tokens of one request, in order, from whichever engine runs it."""

    @property
    def id(self) -> int:
        """What engines call the sequence."""
        ...

    @property
    def times(self) -> EngineTimes:
        """Which engine that is, and how long the request took there and in those before."""
        ...

    async def next(self) -> RequestOutput:
        """Wait for and return everything new since the last call, merged into one output.

        The output with a `finish_reason` is the last one.

        Raises:
            NoEngineAvailable: the request was lost with its engine and nothing can take it over.
            KillsEngines: it is the reason, or has to be taken for it.
            ReaderTooSlow: nobody read for so long that the request was aborted.
        """
        ...

    def close(self) -> None:
        """Forget the request, aborting it in its engine if it has not finished; idempotent."""
        ...


class GenerationClient(Protocol):
    """Submits requests to the least-loaded engine and knows the state of the cluster."""

    @property
    def ready(self) -> bool:
        """Whether at least one engine can serve now."""
        ...

    async def acquainted(self) -> None:
        """Wait until it is known who can serve, which in a new process takes a moment."""
        ...

    @property
    def takes_requests(self) -> bool:
        """Whether requests are taken; they wait while all engines are halted."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the engines take (smallest over engines).

        Raises:
            NoEngineAvailable: no engine is there.
        """
        ...

    @property
    def num_slots(self) -> int:
        """Sequences that the engines can run at once; more than that wait."""
        ...

    @property
    def view(self) -> ClusterView | None:
        """The newest cluster view; None before the first."""
        ...

    @property
    def view_age(self) -> float | None:
        """Seconds since the coordinator's newest view came; None before the first."""
        ...

    @property
    def stats_age(self) -> dict[int, float]:
        """Seconds since the newest stats of each engine were received, by rank."""
        ...

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may name."""
        ...

    async def change_adapter(
        self, name: str, path: str | None = None, in_place: bool = False
    ) -> AdapterOutcome:
        """Load an adapter in all engines, or without a path unload it; return how that ended.

        `in_place` allows another one of the same name to be replaced.
        """
        ...

    async def call_utility(
        self, rank: int | None, name: str, arguments: dict[str, UtilityValue]
    ) -> list[UtilityResult]:
        """Call a utility of one engine, or of all with rank None; return what they answered.

        Raises:
            NoEngineAvailable: there is no such engine now.
        """
        ...

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        pinned_rank: int | None = None,
        tenant: int = 0,
        cache_root: bytes = b"",
        group: int = 0,
        pooling: PoolingParams | None = None,
        adapter: str = "",
    ) -> TokenStream:
        """Route one sequence to an engine and return its stream.

        `tenant`, `cache_root`, `group`, `pooling` and `adapter` are what engines are told
        (`engine.shared.messages.AddRequest`).

        Raises:
            NoEngineAvailable: there is no engine (or the pinned one is not there).
            NoSuchEngine: there is no engine of the pinned rank.
        """
        ...
