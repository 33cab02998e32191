"""The configurations that are explored, and a command that prints the results.

python -m tests.protocol.catalog              the small ones, which the test suite runs
python -m tests.protocol.catalog large        the large ones
python -m tests.protocol.catalog "NAME" ...   these
"""

import resource
import sys

from tests.protocol.explorer import Result, explore
from tests.protocol.situation import Call, Setup
from tests.protocol.world import World

PAUSE, RESUME = Call("pause", 1), Call("resume", 2)

SMALL = {
    "2 engines, 2 front ends, 2 requests": Setup(front_ends=2, requests=2),
    "3 engines, 1 request": Setup(engines=3),
    "3 engines, 2 requests, every notice lost": Setup(engines=3, requests=2, notices=False),
    "3 orders in flight to each engine": Setup(order_window=3),
    "a gather in every 2nd step": Setup(gather_interval=2, steps=3),
    "the coordinator restarts": Setup(coordinator_restarts=1, stats=True, notices=False),
    "an engine restarts": Setup(engine_restarts=1, notices=False),
    "held and resumed without requests": Setup(requests=0, calls=(PAUSE, RESUME)),
    "overlapped, 2 requests": Setup(max_in_flight=2, requests=2, steps=2, notices=False),
    "overlapped, ends not foreseen": Setup(
        max_in_flight=2, steps=2, notices=False, foresees_ends=False
    ),
    "overlapped, a gather in every 2nd step": Setup(
        max_in_flight=2, gather_interval=2, steps=3, notices=False
    ),
    "overlapped, an engine restarts": Setup(
        max_in_flight=2, engine_restarts=1, steps=2, notices=False
    ),
}

LARGE = {
    "the coordinator restarts, with notices": Setup(coordinator_restarts=1, stats=True),
    "an engine restarts, with notices": Setup(engine_restarts=1),
    "an engine restarts twice": Setup(engine_restarts=2, notices=False),
    "held, an engine restarts, resumed": Setup(
        engine_restarts=1, calls=(PAUSE, RESUME), notices=False, requests=0
    ),
    "3 engines, one restarts": Setup(engines=3, engine_restarts=1, notices=False),
    "held, resumed": Setup(calls=(PAUSE, RESUME), notices=False),
    "gather in every 2nd step, 2 requests": Setup(gather_interval=2, steps=3, requests=2),
    "2 engines, 2 front ends, 2 requests, 1 repeat": Setup(front_ends=2, requests=2, duplicates=1),
    "held, resumed, with notices": Setup(calls=(PAUSE, RESUME)),
    "2 engines, 2 front ends, 3 requests": Setup(front_ends=2, requests=3),
    "overlapped, with notices": Setup(max_in_flight=2, steps=2),
    "overlapped, held, resumed": Setup(
        max_in_flight=2, steps=2, calls=(PAUSE, RESUME), notices=False
    ),
    "overlapped, a gather in every 3rd step, held, resumed": Setup(
        max_in_flight=2, steps=4, gather_interval=3, calls=(PAUSE, RESUME), notices=False
    ),
    "overlapped, 3 engines, one restarts": Setup(
        max_in_flight=2, engines=3, engine_restarts=1, notices=False
    ),
    "overlapped, held, an engine restarts, resumed": Setup(
        max_in_flight=2, engine_restarts=1, calls=(PAUSE, RESUME), notices=False, requests=0
    ),
    "overlapped, the coordinator restarts": Setup(
        max_in_flight=2, coordinator_restarts=1, stats=True, steps=2, notices=False
    ),
    "held, 2 requests": Setup(requests=2, calls=(PAUSE, RESUME), notices=False),
    "3 engines, 2 front ends, 2 requests": Setup(engines=3, front_ends=2, requests=2),
}


def settles(setup: Setup) -> bool:
    """Return whether nothing may start the group once all is done.

    Messages that a coordinator missed before its restart may make it start the group once more.
    """
    return setup.coordinator_restarts == 0


def check(setup: Setup) -> Result:
    """Explore one configuration, without a time limit."""
    return explore(World(setup), max_states=20_000_000, settles=settles(setup))


def main(arguments: list[str]) -> int:
    """Explore and print one line per configuration; return 1 if a problem was found."""
    known = SMALL | LARGE
    names = list(LARGE if arguments == ["large"] else arguments or SMALL)
    failed = False
    for name in names:
        result = check(known[name])
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"{name}: {result}, {megabytes:,} MB", flush=True)
        if result.problem is not None:
            print(result.problem)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
