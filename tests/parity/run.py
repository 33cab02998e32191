"""Draws configurations of every served class and prints what becomes of them.

python -m tests.parity.run --seed 1 --each 3; with types of models as arguments, only these.
"""

import argparse
import collections
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

from tests.parity.compare import Outcome, compare
from tests.parity.drawn import draw, model_types

_ATTEMPTS = 4
"""For each configuration: classes accept some that they cannot compute."""


def main() -> int:
    """Return how many configurations were computed wrongly."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=3)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes: dict[str, list[Outcome]] = {}
    for model_type in options.types or model_types():
        outcomes[model_type] = []
        for number in range(_ATTEMPTS * options.each):
            case = draw(model_type, number, options.seed)
            outcome = Outcome("not made", "no configuration was accepted")
            if case is not None:
                with tempfile.TemporaryDirectory() as name:
                    outcome = compare(case, Path(name))
            outcomes[model_type].append(outcome)
            print(f"{model_type}-{number}: {outcome.kind}: {outcome.detail[:300]}", flush=True)
            if outcome.kind == "wrong" and case is not None:
                print(f"    {case.config}", flush=True)
            if sum(each.kind != "not made" for each in outcomes[model_type]) == options.each:
                break
    every = [outcome for each in outcomes.values() for outcome in each]
    print("\n| model_type | agree | refused | not made | wrong | worst, nats |")
    print("|---|---|---|---|---|---|")
    for model_type, each in outcomes.items():
        print(f"| {model_type} | {_row(each)} |")
    print(f"| all, {len(every)} drawn | {_row(every)} |")
    return sum(outcome.kind == "wrong" for outcome in every)


def _row(outcomes: list[Outcome]) -> str:
    counts = collections.Counter(outcome.kind for outcome in outcomes)
    worst = max((each.nats for each in outcomes if each.kind == "agrees"), default=0.0)
    numbers = [str(counts[kind]) for kind in ("agrees", "refused", "not made", "wrong")]
    return " | ".join((*numbers, f"{worst:.1g}"))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
