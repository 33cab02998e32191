"""Interface between the HTTP layer and the client of the engines; tests use a fake."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from engine.shared.messages import (
    AdapterOutcome,
    AddRequest,
    ClusterView,
    FleetRequest,
    KvSource,
    UtilityResult,
    UtilityValue,
)
from server.router.adapters import Adapters
from server.router.token_stream import RequestStream, UnreadOutputs


class NoEngineAvailable(Exception):
    """No engine can serve now; the client can retry later (HTTP 503)."""


class NoSuchEngine(NoEngineAvailable):
    """The requested engine does not exist and is not expected (HTTP 400)."""


class KillsEngines(Exception):
    """The request killed, or may have killed, the engines that ran it; it must not be retried."""


class KvOffer(NamedTuple):
    """An engine that offers KV blocks of prompts to other engines."""

    source: KvSource
    block_size: int


class GenerationClient(Protocol):
    """Submits requests to the least-loaded engine, and exposes the cluster's state."""

    @property
    def ready(self) -> bool:
        """Whether at least one engine can serve now."""
        ...

    @property
    def reaches_engines(self) -> bool:
        """Whether requests need not call `wait_for_engines`."""
        ...

    async def wait_for_engines(self) -> None:
        """Wait until the serving engines are known, which takes a moment in a new process.

        With engines that start on demand, wait for the first one.

        Raises:
            NoEngineAvailable: no engine became available in time.
        """
        ...

    def check_accepts_requests(self) -> None:
        """Return if requests are accepted; they wait while all engines are halted.

        Raises:
            NoEngineAvailable: there is no engine, or this server is shutting down.
        """
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length in tokens: the smallest over all engines.

        Raises:
            NoEngineAvailable: there is no engine.
        """
        ...

    @property
    def serves_images(self) -> bool:
        """Whether any connected engine accepts images."""
        ...

    @property
    def needs_original_images(self) -> bool:
        """Whether engines resize images themselves (`EngineSetup.whole_images`)."""
        ...

    @property
    def num_slots(self) -> int:
        """Sequences that the engines can run at once; further ones wait."""
        ...

    @property
    def view(self) -> ClusterView | None:
        """The newest cluster view; None before the first."""
        ...

    @property
    def view_age(self) -> float | None:
        """Seconds since the newest view arrived; None before the first."""
        ...

    def weight_version(self, rank: int) -> str:
        """Return the version name of an engine's weights; "" for the configured weights."""
        ...

    @property
    def kv_offers(self) -> Mapping[int, KvOffer]:
        """Engines that offer KV blocks of prompts to others, by rank."""
        ...

    @property
    def stats_age(self) -> dict[int, float]:
        """Seconds since the newest stats of each engine arrived, by rank."""
        ...

    @property
    def adapters(self) -> Adapters:
        """Adapters that requests can name."""
        ...

    async def change_adapter(
        self, name: str, path: str | None = None, in_place: bool = False
    ) -> AdapterOutcome:
        """Load an adapter in all engines, or unload it if there is no path; return the outcome.

        `in_place` allows replacing another adapter of the same name.
        """
        ...

    async def call_utility(
        self,
        rank: int | None,
        name: str,
        arguments: dict[str, UtilityValue],
        within: float = 120.0,
    ) -> list[UtilityResult]:
        """Call a utility of one engine, or of all with rank None; return their results.

        An engine that dies meanwhile, or takes more than `within` seconds, yields an error result.

        Raises:
            NoEngineAvailable: there is no such engine now.
        """
        ...

    async def order_fleet(self, request: FleetRequest) -> list[UtilityResult]:
        """Execute an order on all engines, including ones that join later.

        Returns each engine's `info` utility result after it has executed the order.

        Raises:
            NoEngineAvailable: not all engines finished within two minutes; the order stands.
        """
        ...

    def submit(
        self,
        message: AddRequest,
        pinned_rank: int | None = None,
        unread: UnreadOutputs | None = None,
    ) -> RequestStream:
        """Route one sequence to an engine, the pinned one if given; return its stream.

        Sequences that share `unread` are read together.

        The router sets the message's `id`, `front_end` and `wave`.

        Raises:
            NoEngineAvailable: there is no engine, or the pinned one is not available.
            NoSuchEngine: there is no engine with the pinned rank.
        """
        ...
