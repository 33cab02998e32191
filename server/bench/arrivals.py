"""When requests are sent: a pure function of rate, burstiness, count and seed."""

import math
import random
from itertools import accumulate


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds after the start at which `count` requests are due, in order.

    The gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / `rate`: shape
    1 gives exponential gaps, a Poisson process; the coefficient of variation of the gaps is
    1 / sqrt(burstiness). They are scaled so that the last request is due at count / rate, so
    that short runs too have the rate that was asked for. An infinite rate makes all due at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator = random.Random(seed)
    scale = 1.0 / (rate * burstiness)
    times = list(accumulate(generator.gammavariate(burstiness, scale) for _ in range(count)))
    stretch = count / rate / times[-1] if times[-1] > 0 else 1.0
    return [time * stretch for time in times]
