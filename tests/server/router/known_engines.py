"""A front end's view of the engines that a test describes: members and loads."""

from engine.shared.messages import (
    ClusterView,
    EngineEntry,
    EngineSetup,
    EngineStats,
    Received,
    RouteHello,
)
from server.router.load import Loads
from server.router.load_table import LoadTable
from server.router.members import Members
from server.router.routing import EngineLoad

ME, MY_INCARNATION = 0, 500


def setup(max_model_len: int = 512) -> EngineSetup:
    return EngineSetup(
        num_kv_blocks=10, block_size=16, max_model_len=max_model_len, model_fingerprint="f"
    )


def stats(
    rank: int, incarnation: int, version: int, *, running: int = 0, waiting: int = 0,
    tokens: int = 0, received: tuple[Received, ...] = (),
) -> EngineStats:  # fmt: skip
    return EngineStats(
        rank=rank, incarnation=incarnation, version=version, wave=0, step=0, waiting=waiting,
        running=running, kv_usage=0.0, queued_prefill_tokens=tokens, received=list(received),
    )  # fmt: skip


def entry(
    rank: int, incarnation: int, of: EngineStats | None = None, *, ready: bool = True
) -> EngineEntry:
    return EngineEntry(rank, incarnation, ready, "h", 0, setup() if ready else None, of)


def view(
    version: int, *engines: EngineEntry, epoch: int = 1, running: bool = False, wave: int = 0,
    num_front_ends: int = 1,
) -> ClusterView:  # fmt: skip
    return ClusterView(
        epoch=epoch, version=version, wave=wave, running=running, engines=list(engines),
        num_front_ends=num_front_ends,
    )  # fmt: skip


def receive_hello(
    members: Members, rank: int, incarnation: int, *, session: int = 1, now: float = 0.0,
    drains: bool = False,
) -> bool:  # fmt: skip
    """Greet from an engine, on the socket named after its incarnation."""
    hello = RouteHello(rank, incarnation, session, drains=drains)
    return members.hello_received(b"%d" % incarnation, hello, now)


def members_of(*incarnations: int, front_end: int = MY_INCARNATION) -> Members:
    """Engines of ranks 0, 1 ... that are listed, ready and connected."""
    members = Members(front_end, grace=5.0)
    for rank, incarnation in enumerate(incarnations):
        receive_hello(members, rank, incarnation)
    members.take_view(view(1, *(entry(r, i) for r, i in enumerate(incarnations))), now=0.0)
    return members


def open_ranks(members: Members) -> list[int]:
    return [rank for rank, route in members.routes.items() if route.is_open]


class Known:
    """Members with their loads, as known to one front end."""

    def __init__(
        self,
        *incarnations: int,
        table: LoadTable | None = None,
        front_end: tuple[int, int] = (ME, MY_INCARNATION),
    ) -> None:
        self.members = members_of(*incarnations, front_end=front_end[1])
        self.loads = Loads(*front_end, grace=5.0, table=table)

    def observe(self, stats: EngineStats, now: float = 0.0) -> bool:
        return self.loads.observe(self.members.routes[stats.rank], stats, now)

    def sent(self, rank: int, prompt_tokens: int) -> None:
        self.loads.sent(self.members.routes[rank], prompt_tokens)

    def all(self) -> list[EngineLoad]:
        return self.loads.of(self.members.routes.values())

    def requests(self) -> list[int]:
        return [load.requests for load in self.all()]
