"""A configuration of the protocol's world, its states as plain tuples, and small updates."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from coordinator.wave import LockstepWave
from engine.lockstep.wave import EngineWave
from tests.protocol.explorer import State


class Call(NamedTuple):
    """An operator's call, sent to some ranks: "pause" or "resume"."""

    name: str
    epoch: int | None = None
    ranks: tuple[int, ...] = ()
    """Empty means all."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration to explore; the classes are replaced by mutants."""

    engines: int = 2
    front_ends: int = 1
    requests: int = 1
    steps: int = 1
    """Steps that one request takes."""
    gather_interval: int = 1
    max_in_flight: int = 1
    """Maximum steps that a rank has launched and not landed."""
    foresees_ends: bool = True
    """Whether a rank knows in advance which step in flight is the last of a request."""
    duplicates: int = 0
    """Maximum number of duplicate deliveries of notices or orders."""
    calls: tuple[Call, ...] = ()
    """Operators' calls, issued in order at any moment, without waiting for answers."""
    coordinator_restarts: int = 0
    engine_restarts: int = 0
    """Engines that die; the group is formed again, and front ends resend their requests."""
    stats: bool = False
    """Whether engines report stats at any moment, and repeat start reports while they wait."""
    order_window: int = 1
    """Maximum orders in transit to one engine: sending another drops the oldest."""
    notices: bool = True
    """If False, every notice is lost."""
    drains_late: bool = False
    """A wrong loop, which handles messages between a gather and its verdict."""
    engine: type[EngineWave] = EngineWave
    coordinator: type[LockstepWave] = LockstepWave

    @property
    def max_wave(self) -> int:
        """Maximum wave: requests cause one each, and one per notice; calls cause one each."""
        forming = 1 + self.engine_restarts
        requests = self.requests * (1 + self.notices) * (1 + self.engine_restarts)
        calls = len(self.calls) * self.engines
        return forming + requests + calls + self.duplicates + 2 * self.coordinator_restarts


class Rank(NamedTuple):
    """State of one engine."""

    wave: int
    """Number of its `EngineWave`."""
    work: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Per request: its steps left, and for each step in flight whether it is one of them."""
    flying: tuple[int, ...] = ()
    """Tags of the steps in flight, oldest first."""
    newest: int = -1
    """Tag of the newest step launched; -1 if irrelevant."""
    inside: Any = None
    """What it waits for: ("gather", row), ("step", tag, whether it then drains), ("join",
    topology)"""
    orders: tuple[tuple[int, ...], ...] = ()
    reports: tuple[tuple[Any, ...], ...] = ()
    calls: tuple[Call, ...] = ()


class Front(NamedTuple):
    """State of one front end."""

    router: int
    """Number of its `Router`."""
    views: tuple[tuple[Any, ...], ...] = ()
    sent: tuple[tuple[int, ...], ...] = ()
    """By rank: waves stamped on requests in transit."""


class Hub(NamedTuple):
    """State of the coordinator."""

    state: int
    notices: tuple[tuple[int, int], ...] = ()
    """(rank, wave) of each notice in transit."""


class Rest(NamedTuple):
    """Remaining and completed work."""

    unsent: int
    done: int = 0
    calls: int = 0
    duplicates: int = 0
    coordinator_restarts: int = 0
    engine_restarts: int = 0
    topology: int = 0
    """Number of the newest group that was ordered."""


# -- small updates -------------------------------------------------------------------------------


def launched(rank: Rank, tag: int) -> Rank:
    """Return the rank with one more step in flight, used by each request with steps left."""
    work = [(left, (*flags, int(left > sum(flags)))) for left, flags in rank.work]
    return rank._replace(work=tuple(sorted(work)), flying=(*rank.flying, tag), newest=tag)


def landed(rank: Rank) -> tuple[Rank, int]:
    """Return the rank without its oldest step in flight, and the number of requests it ended."""
    work = [(left - flags[0], flags[1:]) for left, flags in rank.work]
    kept = tuple(sorted(each for each in work if each[0]))
    return rank._replace(work=kept, flying=rank.flying[1:]), len(work) - len(kept)


def given_up(rank: Rank) -> Rank:
    """Return the rank without steps in flight, whose work will be recomputed."""
    work = tuple(sorted((left, ()) for left, _ in rank.work))
    return rank._replace(work=work, flying=(), newest=-1)


def put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def without(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    index = items.index(item)
    return items[:index] + items[index + 1 :]


def with_rank(state: State, number: int, rank: Rank) -> State:
    return (put(state[0], number, rank), *state[1:])


def with_front(state: State, index: int, front: Front) -> State:
    ranks, hub, fronts, rest = state
    if not rest.unsent:
        # A front end's views no longer matter.
        front = front._replace(router=0, views=())
        fronts = tuple(each._replace(router=0, views=()) for each in fronts)
    return (ranks, hub, tuple(sorted(put(fronts, index, front))), rest)


def less_duplicates(state: State) -> State:
    rest = state[3]
    return (*state[:3], rest._replace(duplicates=rest.duplicates - 1))


def add_orders(rank: Rank, orders: tuple[tuple[int, ...], ...], window: int) -> Rank:
    # A second copy of an order in transit is equivalent to one.
    others = tuple(order for order in rank.orders if order not in orders)
    return rank._replace(orders=(others + orders)[-window:])
