"""Requests and aborts on their way to engines: which engine, and what if it cannot be reached."""

import logging
from collections.abc import Callable
from typing import Protocol

from engine.shared.messages import AbortRequests, EngineInput, WakeUp
from server.router.routing import Choice, RoutingPolicy
from server.router.state import ClusterState, EngineLost
from server.router.token_stream import RequestStream

logger = logging.getLogger(__name__)


class ClientMetrics(Protocol):
    """What is counted about requests and engines."""

    def routing_decision(self, rank: int, reason: str) -> None: ...

    def request_resumed(self) -> None: ...

    def observe_wake(self, seconds: float) -> None: ...


class Outgoing:
    """Sends each request to the engine that it is pinned to or that the policy chooses.

    Args:
        front_end: this front end's number.
        state: what is known of the engines.
        policy: chooses among them.
        transmit: sends a message to a peer; False if there is no such peer now.
        notify: tells the coordinator of a wake-up.
    """

    def __init__(
        self,
        *,
        front_end: int,
        state: ClusterState,
        policy: RoutingPolicy,
        metrics: ClientMetrics,
        transmit: Callable[[bytes, EngineInput], bool],
        notify: Callable[[WakeUp], None],
    ) -> None:
        self.unreachable: list[EngineLost] = []
        """Engines that turned out to be out of reach, until somebody has seen to their requests."""
        self._front_end = front_end
        self._state = state
        self._policy = policy
        self._metrics = metrics
        self._transmit = transmit
        self._notify = notify
        self._woken_at: float | None = None

    def send(self, stream: RequestStream, now: float) -> bool:
        """Send a request to an engine, or to the next best if that one has just died.

        Returns:
            False if there is no engine for it now.
        """
        state = self._state
        while (choice := self._choose(stream)) is not None:
            rank = choice.rank
            address = state.address_of(rank)
            assert address is not None, f"engine {rank} was offered without a route"
            incarnation, identity = address
            was_paused = state.paused
            message = stream.message(state.wave)
            if not self._transmit(identity, message):
                logger.warning("engine %d cannot be reached", rank)
                self.unreachable += state.out_of_reach(rank, incarnation)
                continue
            stream.rank, stream.incarnation = rank, incarnation
            state.sent(rank, message.num_tokens)
            stream.times.sent(rank, now)
            self._metrics.routing_decision(rank, choice.reason)
            if logger.isEnabledFor(logging.DEBUG):
                name = message.request_id
                fields = {"request_id": name, "engine": rank, "reason": choice.reason}
                logger.debug("request %s goes to engine %d", name, rank, extra=fields)
            if message.alone:
                stream.suspicion.tried_on = (rank, incarnation)
            if was_paused:
                self._wake_up(rank, now)
            return True
        return False

    def _choose(self, stream: RequestStream) -> Choice | None:
        """Return the engine for a request; None if there is none for now."""
        state, pinned_rank = self._state, stream.pinned_rank
        if pinned_rank is not None:
            there = bool(state.loads(lambda rank: rank == pinned_rank))
            return Choice(pinned_rank, "pinned") if there else None
        loads = state.loads(state.awake)
        if not loads:
            return None
        request = stream.request
        return self._policy.choose(
            loads,
            request.prompt_token_ids,
            state.unseen_front_ends,
            cache_root=request.cache_root,
        )

    def abort(self, ids: list[int], rank: int, incarnation: int) -> None:
        """Have an engine process drop requests, if it is there."""
        address = self._state.address_of(rank)
        if address is None or address[0] != incarnation:
            return
        if not self._transmit(address[1], AbortRequests(ids)):
            logger.debug("engine %d went before an abort reached it", rank)

    def leave(self, stream: RequestStream) -> None:
        """Spare an engine that may only be silent the work, should it hear again."""
        identity = self._state.greeted_from(stream.rank, stream.incarnation)
        if identity is not None:
            self._transmit(identity, AbortRequests([stream.request.id]))

    def _wake_up(self, rank: int, now: float) -> None:
        if self._woken_at is None:
            self._woken_at = now
        self._notify(WakeUp(self._front_end, rank, self._state.wave))

    def note_wake(self, running: bool, now: float) -> None:
        """Engines run, or do not: a wake-up may be over."""
        if running and self._woken_at is not None:
            self._metrics.observe_wake(now - self._woken_at)
            self._woken_at = None
