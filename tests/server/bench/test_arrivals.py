import math
import statistics

import pytest

from server.bench.run import arrival_times


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_requested_rate_and_burstiness(burstiness: float) -> None:
    times = arrival_times(20_000, rate=50.0, burstiness=burstiness, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20_000 / 50.0)
    found = gaps(times)
    variation = statistics.pstdev(found) / statistics.fmean(found)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_arrivals_have_exponential_gaps() -> None:
    found = gaps(arrival_times(20_000, rate=10.0, burstiness=1.0, seed=2))
    beyond_the_mean = sum(gap > 0.1 for gap in found) / len(found)
    assert beyond_the_mean == pytest.approx(math.exp(-1), abs=0.02)


def test_infinite_rate_makes_all_arrivals_immediate() -> None:
    assert arrival_times(3, rate=math.inf, burstiness=1.0, seed=0) == [0.0, 0.0, 0.0]


def test_a_seed_fixes_the_arrivals() -> None:
    assert arrival_times(9, 5.0, 0.5, seed=3) == arrival_times(9, 5.0, 0.5, seed=3)
    assert arrival_times(9, 5.0, 0.5, seed=3) != arrival_times(9, 5.0, 0.5, seed=4)
