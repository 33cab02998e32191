"""Reassembles the cluster view from the coordinator's messages: a state machine without I/O."""

from msgspec.structs import replace

from engine.shared.messages import ClusterView, EngineStats, LoadChange, ViewChange

REQUEST_INTERVAL = 1.0
"""Minimum seconds between requests for a full view."""


class FollowedView:
    """The newest complete view of one coordinator."""

    def __init__(self, now: float) -> None:
        """Begin at `now` (seconds, monotonic), when a full view was requested."""
        self.view: ClusterView | None = None
        self._missed = False
        self._requested_at = now

    def take(self, message: ClusterView | ViewChange) -> ClusterView | None:
        """Apply a message; return the new view, or None if it yields none."""
        if isinstance(message, ClusterView):
            self.view, self._missed = message, False
            return message
        known, new = self.view, message.view
        if known is None or new.epoch != known.epoch or message.after > known.version:
            self._missed = True
            return None
        if message.after < known.version:
            return None  # already known
        engines = {each.rank: each for each in known.engines}
        for load in message.loads:
            entry = engines.get(load.rank)
            if entry is None or entry.stats is None:
                self._missed = True
                return None
            engines[load.rank] = replace(entry, stats=_with_load(entry.stats, load))
        engines.update((each.rank, each) for each in new.engines)
        processes = {each.name: each for each in known.processes}
        processes.update((each.name, each) for each in new.processes)
        for rank in message.left:
            engines.pop(rank, None)
        for name in message.processes_left:
            processes.pop(name, None)
        self.view = replace(
            new,
            engines=[entry for _, entry in sorted(engines.items())],
            processes=list(processes.values()),
        )
        return self.view

    def should_request(self, now: float) -> bool:
        """Return whether to request a full view at `now`, because a message was missed."""
        if not self._missed or now - self._requested_at < REQUEST_INTERVAL:
            return False
        self._requested_at = now
        return True


def _with_load(stats: EngineStats, change: LoadChange) -> EngineStats:
    received = stats.received
    if change.received:
        newer = {each.front_end_incarnation: each for each in change.received}
        received = [newer.get(each.front_end_incarnation, each) for each in received]
    return replace(
        stats, version=change.version, wave=change.wave, step=change.step, waiting=change.waiting,
        running=change.running, kv_usage=change.kv_usage,
        queued_prefill_tokens=change.queued_prefill_tokens, received=received,
    )  # fmt: skip
