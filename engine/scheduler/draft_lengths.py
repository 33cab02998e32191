"""How many draft tokens pay in a step: what is expected of them against what they cost.

All prices are parts of what a step costs that computes one token. With `row` the price of each
further token, a step of R tokens costs C(R) = 1 + row * (R - 1). A draft model or head, one pass
of which over one token costs `draft`, needs a pass for each place in the drafts: a pass for m
requests costs draft * C(m). For n requests that are decoded, with drafts of k1 ... kn tokens that
are right up to their j-th token with chance p(i, j), the step is expected to yield

    (n + sum of p(i, j) for j <= ki) / (C(n + sum of ki) + sum over places of draft * C(m))

tokens for its price, and the lengths are those for which this is highest. Without drafts it is
n / C(n): where rows are cheap or few requests run, chances may be low; where they are dear and
many run, no draft pays. Prices are estimates, and to lose is worse than to miss a small gain: so
all that drafts add counts `MARGIN` times.

Since nothing is learned of drafts that are not made, some are made that are not expected to pay,
one token longer than the others: what they are expected to lose is at most `PROBED` of the price
of all steps. Those that turn out right do not count.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

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
        self.probed = -1
        """The newest step with a probe of a request, unless that was right."""
        self.risked = 0.0
        """What the probe that is under way may lose."""
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


PROBED = 0.01
"""Share of the price of steps that may be lost for finding out whether drafts pay again."""

MARGIN = 1.25
"""What is added to a step for drafts counts as so many times its price."""

_MAX_CREDIT = 1.0
"""Price that probes may save up: steps without anything to probe make no flood of them."""


class Prices(NamedTuple):
    """What drafts cost, in steps that compute one token."""

    row: float
    """Of each further token of a step."""
    draft: float = 0.0
    """Of a draft model's pass over one token."""

    def step(self, rows: int) -> float:
        """Return the price of a step of this many tokens, at least 1."""
        return 1 + self.row * (rows - 1)

    def more(self, *, opens: bool) -> float:
        """Return what one more draft token counts, which may need a pass of its own."""
        return MARGIN * (self.row + self.draft * (1.0 if opens else self.row))


class Choice(NamedTuple):
    """Lengths of drafts, and what a step with them is expected to be."""

    lengths: list[int]
    tokens: float
    price: float


def choose(decodes: int, chances: Sequence[Sequence[float]], prices: Prices) -> Choice:
    """Return the lengths of drafts for which a step yields the most tokens for its price.

    Args:
        decodes: requests that are decoded in the step, 1 or more.
        chances: for each request that can have a draft, and each place of it, how likely it is
            right up to there: ever lower. One that is not listed gets no token.
        prices: of the engine.
    """
    best = Choice([0] * len(chances), float(decodes), prices.step(decodes))
    tokens = sorted(
        (-chance, place, index)
        for index, of_request in enumerate(chances)
        for place, chance in enumerate(of_request)
    )
    if not tokens:
        return best
    deepest = 1 + max(place for _, place, _ in tokens)
    best_taken = 0, 0
    # Each further place costs a pass, so that shorter drafts for more requests may be better.
    for depth in range(1, deepest + 1) if prices.draft else (deepest,):
        taken, right, price = 0, float(decodes), prices.step(decodes)
        opened = [False] * depth
        for negated, place, _ in tokens:
            if place >= depth:
                continue
            taken += 1
            right -= negated
            price += prices.more(opens=not opened[place])
            opened[place] = True
            if right * best.price > best.tokens * price:
                best = Choice(best.lengths, right, price)
                best_taken = depth, taken
    depth, taken = best_taken
    for _, _, index in [each for each in tokens if each[1] < depth][:taken]:
        best.lengths[index] += 1
    return best


class Offer(NamedTuple):
    """A request that is decoded, and the most tokens that could be drafted for it."""

    id: int
    most: int


class DraftLengths:
    """Decides in each step how long drafts are; a pure function of counts, without a clock.

    A request's own counts are weighed against those of all requests, and a place in the draft
    against the one before: who was right there is likely to be right again.
    """

    def __init__(self, most: int, prices: Prices) -> None:
        """Drafts have at most `most` tokens."""
        self._most = most
        self._prices = prices
        self._all = _Counts(most, _ALL_FORGET)
        self._counts = defaultdict[int, _Counts](lambda: _Counts(most, _FORGETS))
        """By request."""
        self._credit = 0.0
        """What probes may lose now."""
        self._step = 0

    def decide(self, decodes: int, offers: Sequence[Offer]) -> list[int]:
        """Return how many tokens to draft for each offer, if 1 or more requests are decoded."""
        self._step += 1
        floor = decodes * self._prices.more(opens=False) / self._prices.step(decodes)
        # Less likely ones pay beside no others.
        chances = [
            list(takewhile(lambda chance: chance > floor, self._chances(offer))) for offer in offers
        ]
        choice = choose(decodes, chances, self._prices)
        self._credit += PROBED * choice.price
        self._probe(choice, offers)
        self._credit = min(self._credit, max(_MAX_CREDIT, self._prices.more(opens=True)))
        return choice.lengths

    def observe(self, id: int, proposed: int, accepted: int) -> None:
        """Of so many tokens that were drafted for a request, the first ones were accepted."""
        counts = self._counts[id]
        if counts.drafts < _FIRST:
            self._all.observe(proposed, accepted)
        counts.observe(proposed, accepted)
        if accepted == proposed:
            self._credit += counts.risked
            counts.probed = -1
        counts.risked = 0.0

    def forget(self, id: int) -> None:
        """The request does not run any more."""
        self._counts.pop(id, None)

    @property
    def num_tracked(self) -> int:
        """Number of requests that are remembered."""
        return len(self._counts)

    def _chances(self, offer: Offer) -> Iterator[float]:
        """Yield, by place, the chance that a request's draft is right up to there: ever lower."""
        counts = self._counts[offer.id]
        of_all = own = _PRIOR
        chance = 1.0
        for place in range(min(offer.most, self._most)):
            of_all = self._all.estimate(place, of_all)
            prior = (of_all + own) / 2 if place else of_all
            own = counts.estimate(place, prior)
            chance *= own
            yield chance

    def _probe(self, choice: Choice, offers: Sequence[Offer]) -> None:
        """Lengthen drafts by a token that is not expected to pay.

        Requests go first that were not probed yet or whose last draft was right, then those that
        have waited longest.
        """
        lengths = choice.lengths
        waiting = [index for index, offer in enumerate(offers) if lengths[index] < offer.most]
        waiting.sort(key=lambda index: self._counts[offers[index].id].probed)
        passes = max(lengths, default=0)
        for index in waiting:
            offer, place = offers[index], lengths[index]
            chance = next(islice(self._chances(offer), place, None))
            price = self._prices.more(opens=place >= passes)
            loss = max(0.0, price - chance * choice.price / choice.tokens)
            if loss > self._credit:
                return
            self._credit -= loss
            counts = self._counts[offer.id]
            counts.risked, counts.probed = loss, self._step
            lengths[index] += 1
            passes = max(passes, lengths[index])
