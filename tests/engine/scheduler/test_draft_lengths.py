"""Draft lengths: never much more expensive than none, and used where they help."""

import random
from collections.abc import Callable
from itertools import product

import pytest

from engine.scheduler.draft_lengths import Candidate, DraftLengths, Prices, choose

CPU = Prices(row=0.1)
CPU_WITH_HEAD = Prices(row=0.1, draft=0.06)
DEVICE_WITH_MODEL = Prices(row=0.005, draft=0.15)
PRICES = [CPU, CPU_WITH_HEAD, DEVICE_WITH_MODEL]

IsRight = Callable[[int, int], bool]
"""Whether the next draft token of a request is right, in a step."""


def price(decodes: int, lengths: list[int], prices: Prices) -> float:
    """Return the cost of a step with these draft lengths."""
    passes = [sum(length > position for length in lengths) for position in range(max(lengths))]
    drafting = sum(prices.draft * prices.step(requests) for requests in passes)
    return prices.step(decodes + sum(lengths)) + drafting


class Trace:
    """Runs this many requests concurrently, each of which always has a draft."""

    def __init__(self, decodes: int, limit: int, prices: Prices) -> None:
        self.lengths = DraftLengths(limit, prices)
        self.candidates = [Candidate(id, limit) for id in range(decodes)]
        self.prices = prices
        self.tokens = 0
        self.price = 0.0

    def step(self, number: int, is_right: IsRight) -> list[int]:
        """Run a step and return the number of draft tokens of each request."""
        decodes = len(self.candidates)
        lengths = self.lengths.decide(decodes, self.candidates)
        assert all(0 <= n <= each.limit for n, each in zip(lengths, self.candidates, strict=True))
        self.price += price(decodes, lengths, self.prices)
        self.tokens += decodes
        for (id, _), length in zip(self.candidates, lengths, strict=True):
            accepted = 0
            while accepted < length and is_right(id, number):
                accepted += 1
            self.tokens += accepted
            if length:
                self.lengths.observe(id, length, accepted)
        return lengths

    @property
    def gain(self) -> float:
        """Tokens for the price so far, as a multiple of what they are without drafts."""
        decodes = len(self.candidates)
        return self.tokens / self.price * self.prices.step(decodes) / decodes


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_chosen_draft_lengths_are_optimal(first: int) -> None:
    for seed in range(first, first + 100):
        check_choice(random.Random(seed))


def check_choice(source: random.Random) -> None:
    """Compare what is chosen among drawn offers with all that could be."""
    listed, limit = source.randint(1, 3), source.randint(1, 3)
    decodes = listed + source.choice([0, 0, 1, 20])
    prices = Prices(source.choice([0.0, 0.01, 0.1, 0.5]), source.choice([0.0, 0.05, 0.6]))
    probabilities = [
        sorted((source.random() for _ in range(source.randint(0, limit))), reverse=True)
        for _ in range(listed)
    ]

    def rate(lengths: list[int]) -> float:
        right = sum(sum(each[:n]) for each, n in zip(probabilities, lengths, strict=True))
        plain = prices.step(decodes)
        drafts = price(decodes, lengths, prices) - plain
        return (decodes + right) / (plain + 1.25 * drafts)

    best = max(
        rate(list(lengths))
        for lengths in product(*(range(len(each) + 1) for each in probabilities))
    )
    assert rate(choose(decodes, probabilities, prices).lengths) == pytest.approx(best)


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("decodes", [1, 2, 4, 16, 100])
@pytest.mark.parametrize("probability", [0.0, 0.05, 0.2, 0.3, 0.5, 0.7])
def test_drafts_never_cost_more_than_a_few_percent(
    prices: Prices, decodes: int, probability: float
) -> None:
    """Whatever is accepted: no more than what is spent on finding that out."""
    source = random.Random(f"{decodes} {probability}")
    trace = Trace(decodes, 4, prices)
    for number in range(200):
        trace.step(number, lambda id, step: source.random() < probability)
    assert trace.gain > 0.95


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize(("decodes", "gain"), [(1, 2.2), (4, 1.6)])
def test_drafting_continues_where_it_pays(prices: Prices, decodes: int, gain: float) -> None:
    source = random.Random(decodes)
    trace = Trace(decodes, 4, prices)
    for number in range(200):
        trace.step(number, lambda id, step: source.random() < 0.9)
    assert trace.gain > gain


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("decodes", [1, 4])
def test_a_text_that_becomes_predictable_is_noticed(prices: Prices, decodes: int) -> None:
    trace = Trace(decodes, 4, prices)
    for number in range(200):
        trace.step(number, lambda id, step: False)
    before = [sum(trace.step(number, lambda id, step: False)) for number in range(20)]
    assert sum(before) <= 20 * decodes / 2
    for number in range(150):
        lengths = trace.step(number, lambda id, step: True)
    assert lengths == [4] * decodes


@pytest.mark.parametrize("prices", [CPU, CPU_WITH_HEAD])
def test_draft_length_follows_acceptance_of_the_request(prices: Prices) -> None:
    trace = Trace(4, 4, prices)
    drafted = [0] * 4
    for number in range(200):
        lengths = trace.step(number, lambda id, step: id == 2)
        if number >= 100:
            drafted = [total + length for total, length in zip(drafted, lengths, strict=True)]
    assert drafted[2] == 400
    assert max(drafted[:2] + drafted[3:]) < 50


def test_new_request_starts_with_average_acceptance() -> None:
    lengths = DraftLengths(4, CPU)
    assert lengths.decide(1, [Candidate(1, 4)]) == [4]
    for id in range(2, 60):
        lengths.observe(id, 1, 0)
        lengths.forget(id)
    drafts = [lengths.decide(1, [Candidate(99, 4)])[0] for _ in range(10)]
    assert max(drafts) <= 1


def test_small_batches_are_drafted_for_and_large_ones_are_not() -> None:
    probabilities = [[0.3]] * 16
    lengths = [sum(choose(n, probabilities[:n], CPU).lengths) for n in (1, 2, 16)]
    assert lengths == [1, 2, 0]
    assert sum(choose(16, probabilities, DEVICE_WITH_MODEL).lengths) == 16


@pytest.mark.parametrize("decodes", [1, 200])
def test_free_drafts_are_always_made(decodes: int) -> None:
    trace = Trace(decodes, 4, Prices(0.0))
    for number in range(30):
        assert trace.step(number, lambda id, step: False) == [4] * decodes


@pytest.mark.parametrize("seed", range(20))
def test_the_same_counts_lead_to_the_same_lengths(seed: int) -> None:
    source = random.Random(seed)
    both = [DraftLengths(5, CPU_WITH_HEAD) for _ in range(2)]
    for _ in range(100):
        candidates = [Candidate(id, source.randint(1, 5)) for id in source.sample(range(9), 4)]
        one, other = (each.decide(6, candidates) for each in both)
        assert one == other
        for (id, most), length in zip(candidates, one, strict=True):
            assert 0 <= length <= most
            accepted = source.randint(0, length)
            gone = source.random() < 0.1
            for each in both:
                if length:
                    each.observe(id, length, accepted)
                if gone:
                    each.forget(id)
    for each in both:
        for id in range(9):
            each.forget(id)
        assert each.num_tracked == 0
