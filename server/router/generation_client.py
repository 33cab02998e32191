"""What the HTTP layer needs of the client that reaches the engines; tests give it a fake."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from engine.shared.messages import (
    AdapterOutcome,
    AddRequest,
    ClusterView,
    FleetWish,
    KvSource,
    UtilityResult,
    UtilityValue,
)
from server.router.adapters import Adapters
from server.router.token_stream import RequestStream, Unread


class NoEngineAvailable(Exception):
    """No engine can serve now; the client may try again later (HTTP 503)."""


class NoSuchEngine(NoEngineAvailable):
    """The requested engine does not exist and is not expected (HTTP 400)."""


class KillsEngines(Exception):
    """The request killed the engines that ran it, or may have: it must not be sent again."""


class KvOffer(NamedTuple):
    """An engine that offers KV blocks of prompts to others."""

    source: KvSource
    block_size: int


class GenerationClient(Protocol):
    """Submits requests to the least-loaded engine and knows the state of the cluster."""

    @property
    def ready(self) -> bool:
        """Whether at least one engine can serve now."""
        ...

    @property
    def reaches_engines(self) -> bool:
        """Whether a request need not wait for engines (`wait_for_engines`)."""
        ...

    async def wait_for_engines(self) -> None:
        """Wait until the engines that serve are known, which takes a moment in a new process.

        Where engines come when they are needed, wait for the first one.

        Raises:
            NoEngineAvailable: none came in time.
        """
        ...

    def check_takes_requests(self) -> None:
        """Return if requests are taken; they wait while all engines are halted.

        Raises:
            NoEngineAvailable: there is no engine, or this server is shutting down.
        """
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the engines take (smallest over engines).

        Raises:
            NoEngineAvailable: no engine is there.
        """
        ...

    @property
    def serves_images(self) -> bool:
        """Whether an engine that is there takes images."""
        ...

    @property
    def wants_whole_images(self) -> bool:
        """Whether engines resize images themselves (`EngineSetup.whole_images`)."""
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

    def weight_version(self, rank: int) -> str:
        """What the weights of an engine are called; "" for those of its settings."""
        ...

    @property
    def kv_offers(self) -> Mapping[int, KvOffer]:
        """The engines that offer KV blocks of prompts to others, by rank."""
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
        self,
        rank: int | None,
        name: str,
        arguments: dict[str, UtilityValue],
        within: float = 120.0,
    ) -> list[UtilityResult]:
        """Call a utility of one engine, or of all with rank None; return what they answered.

        An engine that dies meanwhile, or takes more than `within` seconds, answers an error.

        Raises:
            NoEngineAvailable: there is no such engine now.
        """
        ...

    async def order_fleet(self, wish: FleetWish, within: float = 120.0) -> list[UtilityResult]:
        """Have all engines do something, those that are still to come included.

        Returns what each says of itself when it has done it (the utility `info`).

        Raises:
            NoEngineAvailable: not all had done it within `within` seconds; the order stands.
        """
        ...

    def submit(
        self,
        message: AddRequest,
        pinned_rank: int | None = None,
        unread: Unread | None = None,
    ) -> RequestStream:
        """Route one sequence to an engine, the pinned one if there is one; return its stream.

        Sequences that share `unread` are read together.

        The router sets the message's `id`, `front_end` and `wave`.

        Raises:
            NoEngineAvailable: there is no engine (or the pinned one is not there).
            NoSuchEngine: there is no engine of the pinned rank.
        """
        ...
