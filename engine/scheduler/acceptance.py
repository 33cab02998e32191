"""How likely draft tokens are accepted, learned from how many were."""

from collections.abc import Iterator

_FORGETS = 15 / 16
"""What a count is worth after another draft of the same request: some 16 count."""

_WEIGHT = 4.0
"""As many drafts of a request count as much as what is known of all requests."""

_FIRST = 16
"""Drafts of each request that count for all: what to expect of the next one."""

_ALL_FORGET = 255 / 256

_PRIOR = 0.8
"""Chance of a token to be accepted after all before it, until anything is known."""


class _Counts:
    """By place in drafts: how many tokens were looked at there, and how many were right."""

    def __init__(self, places: int, forgets: float) -> None:
        self.tried = [0.0] * places
        self.right = [0.0] * places
        self.drafts = 0
        self._forgets = forgets

    def observe(self, proposed: int, accepted: int) -> None:
        """Nothing is said of the tokens after the first wrong one."""
        self.drafts += 1
        for place in range(min(accepted + 1, proposed)):
            self.tried[place] = self.tried[place] * self._forgets + 1
            self.right[place] = self.right[place] * self._forgets + (place < accepted)

    def estimate(self, place: int, prior: float) -> float:
        """Return the chance at a place if those before it were right, from 0 to 1."""
        return (self.right[place] + _WEIGHT * prior) / (self.tried[place] + _WEIGHT)


class Acceptance:
    """Estimates the chances of draft tokens; a pure function of what it is told.

    A request's own counts are weighed against those of all requests, and a place in the draft
    against the one before: who was right there is likely to be right again.
    """

    def __init__(self, places: int) -> None:
        """Drafts have at most so many tokens."""
        self._places = places
        self._all = _Counts(places, _ALL_FORGET)
        self._counts: dict[int, _Counts] = {}

    def chances(self, id: int) -> Iterator[float]:
        """Yield, by place, the chance that a request's draft is right up to there: ever lower."""
        counts = self._counts.get(id)
        of_all = own = _PRIOR
        chance = 1.0
        for place in range(self._places):
            of_all = self._all.estimate(place, of_all)
            prior = (of_all + own) / 2 if place else of_all
            own = prior if counts is None else counts.estimate(place, prior)
            chance *= own
            yield chance

    def observe(self, id: int, proposed: int, accepted: int) -> None:
        """Of so many tokens that were proposed for a request, the first ones were accepted."""
        counts = self._counts.get(id)
        if counts is None:
            counts = self._counts[id] = _Counts(self._places, _FORGETS)
        if counts.drafts < _FIRST:
            self._all.observe(proposed, accepted)
        counts.observe(proposed, accepted)

    def forget(self, id: int) -> None:
        """The request does not run any more."""
        self._counts.pop(id, None)

    @property
    def num_tracked(self) -> int:
        """Number of requests that are remembered."""
        return len(self._counts)
