"""Runs simulated fault schedules: python -m tests.faults.run --schedules 10000

Every schedule is determined by its seed; failing ones are printed, and can be repeated with python
-m tests.faults.run --seed SEED
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

from tests.faults.parts import Parts
from tests.faults.plan import draw_plan
from tests.faults.world import Violation, World

_CHUNK = 100


class Failure(NamedTuple):
    """A seed whose run violated a property."""

    seed: int
    what: str

    def __str__(self) -> str:
        again = f"python -m tests.faults.run --seed {self.seed}"
        return f"seed {self.seed}: {self.what}\n    again: {again}"


PRODUCTION = Parts()


def run_seed(seed: int, parts: Parts = PRODUCTION) -> Failure | None:
    """Run one schedule; return the failure, if any."""
    try:
        World(draw_plan(seed), parts).run()
    except Violation as violation:
        return Failure(seed, str(violation))
    except Exception as error:  # a mutant, or a bug, may break anything
        return Failure(seed, f"{type(error).__name__}: {error}")
    return None


def run_seeds(seeds: Iterable[int], parts: Parts = PRODUCTION) -> list[Failure]:
    """Run many schedules with logging disabled; return the failures."""
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    collecting = gc.isenabled()
    gc.disable()
    try:
        failures = []
        for number, seed in enumerate(seeds):
            failure = run_seed(seed, parts)
            if failure is not None:
                failures.append(failure)
            if number % 50 == 49:
                gc.collect()
        return failures
    finally:
        logging.disable(quiet)
        if collecting:
            gc.enable()


def _run_chunk(first: int) -> list[Failure]:
    return run_seeds(range(first, first + _CHUNK))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seed", type=int, help="run this one only, and say what happens")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.seed is not None:
        logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
        print(draw_plan(options.seed).describe())
        failure = run_seed(options.seed)
        print(failure or "all promises kept")
        return failure is not None
    began = time.monotonic()
    firsts = range(options.first, options.first + options.schedules, _CHUNK)
    failures: list[Failure] = []
    import multiprocessing  # this module's other users start no processes

    with multiprocessing.Pool(options.processes) as pool:
        for found in pool.imap_unordered(_run_chunk, firsts):
            for failure in found:
                print(failure, flush=True)
            failures += found
    took = time.monotonic() - began
    print(f"{len(firsts) * _CHUNK} schedules, {len(failures)} failures, {took:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
