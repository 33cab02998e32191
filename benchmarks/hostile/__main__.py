"""Runs all attacks against its own server, and prints the cost of each.

    python -m benchmarks.hostile
    python -m benchmarks.hostile --only connections costly
    python -m benchmarks.hostile --only fields --part 3/20
    python -m benchmarks.hostile --part 1/10 -- --max-body-bytes 1000000

Exits with status 1 if a bound was exceeded. Arguments after `--` are flags of the server.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks.hostile.connections import ATTACKS
from benchmarks.hostile.operations import OPERATIONS
from benchmarks.hostile.requests import REQUESTS
from benchmarks.hostile.trial import GAP_BOUND, MEMORY_BOUND, STALL_BOUND, Trial

_PRINT_EVERY = 10.0
"""Seconds between progress lines."""


def table(trial: Trial) -> Table:
    """Return the results of all attacks, with exceeded bounds in the last column."""
    found = Table(
        "attack", "answer", "body", "memory", "loop", "probe", "others' gaps", "exceeded",
        title=f"bounds: {MEMORY_BOUND >> 20} MB beyond the body, {STALL_BOUND * 1e3:.0f} ms of the "
        f"loop, {GAP_BOUND} x others' gaps",
    )  # fmt: skip
    for row in trial.rows:
        ratio = "" if row.gap_ratio is None else f"{row.gap_ratio:.2f}"
        found.add_row(
            row.name, row.outcome, f"{row.size / 1e6:.2f} MB" if row.size else "",
            f"{row.cost.memory / 2**20:.0f} MB", f"{row.cost.stall * 1e3:.0f} ms",
            f"{row.cost.silence * 1e3:.0f} ms", ratio, "; ".join(row.wrong),
        )  # fmt: skip
    return found


def _part(text: str) -> tuple[int, int]:
    """Parse "K/N" into (K, N)."""
    which, _, number = text.partition("/")
    if not (which.isdecimal() and number.isdecimal() and 1 <= int(which) <= int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")
    return int(which), int(number)


def main() -> None:
    """Parse the arguments, run the attacks, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = (
        *("fields", "admin", "costly", "patterns", "grammars", "large", "kept", "shown", "gaps"),
        *("connections", "upgrades", "unread", "disks", "queues"),
    )
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="send only every N-th of the values of fields (some 44,600), beginning with the K-th, "
        "so that they can be sent in N runs, 1/N to N/N",
    )
    parser.add_argument(
        "--paths", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="of the fields"
    )
    parser.add_argument("--key", help="API key of the server; default: none is asked for")
    parser.add_argument("--without-key", action="store_true", help="attack without the key")
    parser.add_argument("server", nargs="*", help="flags of the server, after --")
    arguments = parser.parse_args()
    console = Console()
    trial = Trial(*arguments.server, key=arguments.key, with_key=not arguments.without_key)
    part = arguments.part
    attacks: dict[str, Callable[[], Iterator[str]]] = {
        "fields": partial(trial.fields, part, arguments.paths),
        "admin": partial(trial.admin, part),
        **{kind: partial(trial.requests, kind) for kind in REQUESTS},
        **{kind: partial(trial.raw, kind) for kind in ATTACKS},
        **{"kept": trial.kept, "shown": trial.shown, "gaps": trial.gaps, "unread": trial.unread},
        **{"disks": trial.disks, "queues": trial.queues},
    }
    due = time.monotonic()
    with trial:
        for kind in arguments.only:
            for name in attacks[kind]():
                if time.monotonic() >= due:
                    due = time.monotonic() + _PRINT_EVERY
                    print(f"{kind}: {name}", file=sys.stderr, flush=True)
    console.print(table(trial))
    for each in trial.leftovers:
        console.print(f"[red]left behind:[/] {each}")
    sys.exit(1 if trial.leftovers or any(row.wrong for row in trial.rows) else 0)


if __name__ == "__main__":
    main()
