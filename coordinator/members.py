"""Registered members as they described themselves, and number assignment. No I/O.

Engines are identified by their ranks, front ends by their indices. A newcomer that has a number
keeps it; one that requests a number gets the lowest free one. A coordinator that has just started
does not know yet which are free: members of its predecessor may be alive, and register again within
the timeout after which silent members are removed. If one of them lost its number to a newcomer,
engines would drop its requests, or front ends would move them. So no number is assigned before that
timeout, unless the launch parameters exclude such members.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.agreement import refused_by_protocol, refused_by_settings
from engine.shared.membership import JOIN_TIMEOUT
from engine.shared.messages import (
    Draining,
    EngineEntry,
    EngineSetup,
    EngineStats,
    FrontEndEntry,
    Goodbye,
    GroupStatus,
    Heartbeat,
    Hello,
    MemberKind,
    ProcessEntry,
    Ready,
    Refused,
)

MAX_WAIT = JOIN_TIMEOUT / 2
"""Maximum seconds after start before a coordinator assigns numbers, which bounds the wait of
newcomers."""


@dataclass
class Member:
    """State of one engine or front end."""

    index: int
    incarnation: int
    hello: Hello
    process: ProcessEntry
    """The member's entry in published views."""
    last_seen: float
    ready: bool = False
    draining: bool = False
    setup: EngineSetup | None = None
    stats: EngineStats | None = None
    group_status: GroupStatus | None = None


class Members:
    """All members by kind and number, with the restart count of each engine."""

    def __init__(self) -> None:
        self.engines: dict[int, Member] = {}
        self.front_ends: dict[int, Member] = {}
        self._restarts: dict[int, int] = {}
        self._last_incarnation: dict[int, int] = {}
        self._last_check_at: float | None = None

    def of(self, kind: MemberKind) -> dict[int, Member]:
        """Return the members of a kind by number."""
        return self.engines if kind == "engine" else self.front_ends

    @property
    def is_empty(self) -> bool:
        """Whether there are no members."""
        return not self.engines and not self.front_ends

    def find(self, message: Hello | Ready | Heartbeat | Draining) -> Member | None:
        """Return the sender of a message, None if it is not a registered member."""
        member = self.of(message.kind).get(message.index)
        return member if member and member.incarnation == message.incarnation else None

    def find_leaving(self, message: Goodbye) -> Member | None:
        """Return the member that a goodbye refers to, None if it is not registered."""
        for index, member in self.of(message.kind).items():
            if member.incarnation == message.incarnation and message.index in (index, -1):
                return member
        return None

    def silent(self, now: float, timeout: float) -> list[tuple[MemberKind, int]]:
        """Return the members that have sent nothing for `timeout` seconds.

        Must be called at least four times per `timeout`. After a longer gap this process itself was
        stalled and has unread messages, so no member counts as silent.
        """
        was_stalled = self._last_check_at is not None and now - self._last_check_at > timeout / 2
        self._last_check_at = now
        kinds: tuple[MemberKind, MemberKind] = ("engine", "front_end")
        silent = []
        for kind in kinds:
            for index, member in self.of(kind).items():
                if was_stalled:
                    member.last_seen = now
                elif member.last_seen < now - timeout:
                    silent.append((kind, index))
        return silent

    def refusal(self, hello: Hello) -> Refused | None:
        """Return why a newcomer must not join the current members, None if it can."""
        refusal = refused_by_protocol(hello.protocol, hello.version)
        if refusal is not None:
            return refusal
        holder = self.of(hello.kind).get(hello.index)
        if holder is not None and holder.incarnation != hello.incarnation:
            where = f"pid {holder.hello.pid} on {holder.hello.host}"
            if hello.given:
                return Refused(
                    f"{hello.kind} {hello.index} was silent for so long that its number was "
                    f"reassigned to {where}: it has to restart",
                    field="index",
                )
            return Refused(
                f"{hello.kind} {hello.index} is held by {where}, which has not timed out yet",
                field="index",
                final=False,
            )
        others = {
            peer.index: peer.hello.group_config
            for peer in self.engines.values()
            if hello.kind != "engine" or peer.incarnation != hello.incarnation
        }
        return refused_by_settings(hello, others)

    def add(self, hello: Hello, index: int, now: float) -> None:
        """Register a newcomer under an assigned number."""
        name = f"{'engine' if hello.kind == 'engine' else 'api'} {index}"
        process = ProcessEntry(name, hello.host, hello.version, hello.protocol, None)
        self.of(hello.kind)[index] = Member(index, hello.incarnation, hello, process, now)
        if hello.kind == "engine":
            # A member that was only silent for a while returns with the same incarnation.
            known = self._last_incarnation.get(index)
            self._last_incarnation[index] = hello.incarnation
            restarted = known is not None and known != hello.incarnation
            self._restarts[index] = self._restarts.get(index, 0) + restarted

    @property
    def is_balanced_externally(self) -> bool:
        """Whether every front end serves exactly one engine, so that no member needs loads."""
        front_ends = self.front_ends.values()
        return bool(front_ends) and all(each.hello.scope.rank is not None for each in front_ends)

    @property
    def accept_changes(self) -> bool:
        """Whether there are front ends and all of them accept incremental views."""
        front_ends = self.front_ends.values()
        return bool(front_ends) and all(each.hello.takes_changes for each in front_ends)

    @property
    def ready_engines(self) -> set[tuple[int, int]]:
        """Ranks and incarnations of the engines that are ready."""
        return {(each.index, each.incarnation) for each in self.engines.values() if each.ready}

    @property
    def all_front_ends(self) -> set[tuple[int, int]]:
        """Indices and incarnations of the front ends."""
        return {(each.index, each.incarnation) for each in self.front_ends.values()}

    def engine_entries(self, adapters: Callable[[tuple[int, int]], list[str]]) -> list[EngineEntry]:
        """Return the entries that describe the engines to front ends.

        Args:
            adapters: returns the adapter versions of an engine, given its rank and incarnation.
        """
        return [
            EngineEntry(
                member.index, member.incarnation, member.ready, member.hello.host,
                self._restarts[member.index], member.setup, member.stats, member.draining,
                adapters((member.index, member.incarnation)),
            )
            for _, member in sorted(self.engines.items())
        ]  # fmt: skip

    def front_end_entries(self) -> list[FrontEndEntry]:
        """Return the entries that describe the front ends to engines."""
        return [
            FrontEndEntry(
                member.index,
                member.incarnation,
                addresses,
                member.hello.scope,
                member.hello.protocol,
            )
            for member in self.front_ends.values()
            if (addresses := member.hello.addresses) is not None
        ]


class NumberAssignment:
    """Assigns numbers to members of one coordinator.

    Args:
        grace: seconds that a predecessor's members get to register again; 0 if there are none.
    """

    def __init__(self, grace: float) -> None:
        self._grace = min(grace, MAX_WAIT)
        self._open_at: float | None = None

    def start(self, now: float) -> None:
        """Record when the coordinator started; only the first call counts."""
        if self._open_at is None:
            self._open_at = now + self._grace

    def number_for(self, hello: Hello, assigned: Mapping[int, int], now: float) -> int | Refused:
        """Return a newcomer's number, or a refusal that makes it retry.

        Args:
            assigned: incarnations of all members of its kind, by number.
        """
        if hello.index >= 0:
            return hello.index
        for number, incarnation in assigned.items():
            if incarnation == hello.incarnation:
                return number
        if self._open_at is None or now < self._open_at:
            return Refused(
                f"the coordinator has just started: it assigns numbers after {self._grace:.0f} "
                "s, once members of its predecessor have registered again",
                field="index",
                final=False,
            )
        return next(number for number in range(len(assigned) + 1) if number not in assigned)
