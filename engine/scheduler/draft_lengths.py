"""Choice of draft lengths: the expected tokens per step against the cost of drafting.

All prices are relative to the cost of a step that computes one token. With `row` the price of each
further token, a step of R tokens costs C(R) = 1 + row * (R - 1). A draft model or head, one pass of
which over one token costs `draft`, needs a pass per draft position: a pass for m requests costs
draft * C(m). For n decoding requests, with drafts of k1 ... kn tokens that are accepted up to the
j-th with probability p(i, j), the expected ratio of tokens to price is

    (n + sum of p(i, j) for j <= ki) / (C(n + sum of ki) + sum over places of draft * C(m))

and the lengths maximize it. Without drafts it is n / C(n): if rows are cheap or few requests run,
low probabilities suffice; if rows are expensive and many run, no draft pays off. Prices are
estimates, and a loss is worse than a small missed gain, so all costs of drafts are multiplied by
`MARGIN`.

Since nothing is learned without drafts, probes are made that are not expected to pay off, one token
longer than the chosen length. Their expected loss is at most `PROBED` of the price of all steps;
accepted probes are not charged.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

_DECAY = 15 / 16
"""Decay of a request's counts per draft: about the last 16 drafts count."""

_WEIGHT = 4.0
"""Weight of the prior, in drafts, against a request's own counts."""

_FIRST = 16
"""Number of first drafts of each request that are counted in the totals over all requests."""

_TOTAL_DECAY = 255 / 256

_PRIOR = 0.8
"""Prior acceptance probability of a token, given that all before it were accepted."""


class _Counts:
    """Per draft position, decayed counts of tokens verified and of tokens accepted."""

    def __init__(self, positions: int, decay: float) -> None:
        self.verified = [0.0] * positions
        self.accepted = [0.0] * positions
        self.drafts = 0
        self.probed = -1
        """Step of the request's newest probe; -1 if none, or if it was accepted."""
        self.risked = 0.0
        """Expected loss of the pending probe."""
        self._decay = decay

    def observe(self, proposed: int, accepted: int) -> None:
        """Count one draft; tokens after the first rejected one carry no information."""
        self.drafts += 1
        for position in range(min(accepted + 1, proposed)):
            self.verified[position] = self.verified[position] * self._decay + 1
            self.accepted[position] = self.accepted[position] * self._decay + (position < accepted)

    def estimate(self, position: int, prior: float) -> float:
        return (self.accepted[position] + _WEIGHT * prior) / (self.verified[position] + _WEIGHT)


PROBED = 0.01
"""Fraction of the price of steps that probes may lose."""

MARGIN = 1.25
"""Factor on all costs that drafts add to a step."""

_MAX_CREDIT = 1.0
"""Maximum credit for probes, in prices, so that it does not accumulate while none are possible."""


class Prices(NamedTuple):
    """Costs of drafts, relative to a step that computes one token."""

    row: float
    """Price of each further token of a step."""
    draft: float = 0.0
    """Price of a draft model's pass over one token."""

    def step(self, rows: int) -> float:
        """Return the price of a step of this many tokens, at least 1."""
        return 1 + self.row * (rows - 1)

    def more(self, *, needs_pass: bool) -> float:
        """Return the weighted price of a further draft token, with a pass if `needs_pass`."""
        return MARGIN * (self.row + self.draft * (1.0 if needs_pass else self.row))


class Choice(NamedTuple):
    """Draft lengths, with the expected tokens and price of the step."""

    lengths: list[int]
    tokens: float
    price: float


def choose(decodes: int, probabilities: Sequence[Sequence[float]], prices: Prices) -> Choice:
    """Return the draft lengths that maximize the expected tokens per price of a step.

    Args:
        decodes: number of decoding requests, at least 1.
        chances: for each request that can have a draft, the probability per position that the draft
            is accepted up to there, strictly decreasing. Positions not listed get no token.
        prices: of the engine.
    """
    best = Choice([0] * len(probabilities), float(decodes), prices.step(decodes))
    tokens = sorted(
        (-probability, position, index)
        for index, of_request in enumerate(probabilities)
        for position, probability in enumerate(of_request)
    )
    if not tokens:
        return best
    deepest = 1 + max(position for _, position, _ in tokens)
    best_taken = 0, 0
    # Each further position costs a pass, so shorter drafts for more requests can be better.
    for depth in range(1, deepest + 1) if prices.draft else (deepest,):
        taken, accepted, price = 0, float(decodes), prices.step(decodes)
        opened = [False] * depth
        for negated, position, _ in tokens:
            if position >= depth:
                continue
            taken += 1
            accepted -= negated
            price += prices.more(needs_pass=not opened[position])
            opened[position] = True
            if accepted * best.price > best.tokens * price:
                best = Choice(best.lengths, accepted, price)
                best_taken = depth, taken
    depth, taken = best_taken
    for _, _, index in [each for each in tokens if each[1] < depth][:taken]:
        best.lengths[index] += 1
    return best


class Candidate(NamedTuple):
    """A decoding request, and the maximum number of tokens to draft for it."""

    id: int
    limit: int


class DraftLengths:
    """Chooses draft lengths for each step, as a pure function of counts, without a clock.

    A request's counts are combined with those of all requests and of the position before, since
    acceptance there predicts acceptance at the next.
    """

    def __init__(self, limit: int, prices: Prices) -> None:
        """Limit drafts to `limit` tokens."""
        self._limit = limit
        self._prices = prices
        self._totals = _Counts(limit, _TOTAL_DECAY)
        self._counts = defaultdict[int, _Counts](lambda: _Counts(limit, _DECAY))
        """By request."""
        self._credit = 0.0
        """Loss that probes may still incur."""
        self._step = 0

    def decide(self, decodes: int, candidates: Sequence[Candidate]) -> list[int]:
        """Return the number of tokens to draft for each offer; `decodes` must be at least 1."""
        self._step += 1
        floor = decodes * self._prices.more(needs_pass=False) / self._prices.step(decodes)
        # Less likely tokens do not pay off, whatever the other drafts are.
        probabilities = [
            list(takewhile(lambda probability: probability > floor, self._probabilities(candidate)))
            for candidate in candidates
        ]
        choice = choose(decodes, probabilities, self._prices)
        self._credit += PROBED * choice.price
        self._probe(choice, candidates)
        self._credit = min(self._credit, max(_MAX_CREDIT, self._prices.more(needs_pass=True)))
        return choice.lengths

    def observe(self, id: int, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of the `proposed` draft tokens were accepted."""
        counts = self._counts[id]
        if counts.drafts < _FIRST:
            self._totals.observe(proposed, accepted)
        counts.observe(proposed, accepted)
        if accepted == proposed:
            self._credit += counts.risked
            counts.probed = -1
        counts.risked = 0.0

    def forget(self, id: int) -> None:
        """Drop the counts of a request that no longer runs."""
        self._counts.pop(id, None)

    @property
    def num_tracked(self) -> int:
        """Number of requests with counts."""
        return len(self._counts)

    def _probabilities(self, candidate: Candidate) -> Iterator[float]:
        """Yield the probability, per position, that a draft is accepted up to there."""
        counts = self._counts[candidate.id]
        total = estimate = _PRIOR
        probability = 1.0
        for position in range(min(candidate.limit, self._limit)):
            total = self._totals.estimate(position, total)
            prior = (total + estimate) / 2 if position else total
            estimate = counts.estimate(position, prior)
            probability *= estimate
            yield probability

    def _probe(self, choice: Choice, candidates: Sequence[Candidate]) -> None:
        """Lengthen drafts by one token that is not expected to pay off.

        Requests that were never probed, or whose last probe was accepted, come first, then the
        least recently probed.
        """
        lengths = choice.lengths
        waiting = [
            index for index, candidate in enumerate(candidates) if lengths[index] < candidate.limit
        ]
        waiting.sort(key=lambda index: self._counts[candidates[index].id].probed)
        passes = max(lengths, default=0)
        for index in waiting:
            candidate, position = candidates[index], lengths[index]
            probability = next(islice(self._probabilities(candidate), position, None))
            price = self._prices.more(needs_pass=position >= passes)
            loss = max(0.0, price - probability * choice.price / choice.tokens)
            if loss > self._credit:
                return
            self._credit -= loss
            counts = self._counts[candidate.id]
            counts.risked, counts.probed = loss, self._step
            lengths[index] += 1
            passes = max(passes, lengths[index])
