"""Wave number and running flag of a group of independent engines, from their own reports.

Independent engines sleep on their own queues and need no waking. The wave still counts how often
the group as a whole went from running to paused, so that people and dashboards see the same
picture for every kind of group. The number is a logical clock: it only grows, and whoever
brings a larger one from before a restart of the coordinator is believed.
"""


class IndependentWave:
    """Derives (wave, running) from which engines have work."""

    def __init__(self) -> None:
        self.wave = 0
        self.running = False
        self._busy: set[int] = set()

    def adopt(self, wave: int) -> None:
        """Take over a wave number that a member remembers."""
        self.wave = max(self.wave, wave)

    def report(self, rank: int, has_work: bool) -> bool:
        """Note what an engine said of itself; return whether the running flag changed."""
        if has_work:
            self._busy.add(rank)
        else:
            self._busy.discard(rank)
        return self._settle()

    def forget(self, rank: int) -> bool:
        """An engine has gone; return whether the running flag changed."""
        return self.report(rank, has_work=False)

    def _settle(self) -> bool:
        running = bool(self._busy)
        changed = running != self.running
        if changed and not running:
            self.wave += 1
        self.running = running
        return changed
