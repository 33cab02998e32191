"""Kills each process of an engine in turn under load, for each way to divide a model.

    python -m benchmarks.kill_each
    python -m benchmarks.kill_each --layouts tp pp --streams 12 --tokens 120

For each way two engines serve the bundled model in float32. The streams are answered once in peace.
Then for each process of the first engine (where experts are shared, of both) all streams are sent
again, and when a share of the pieces is there, that process gets SIGKILL. Told are: how many
streams ended as in peace, the longest pause in any, after how many seconds the engine was back, and
how many of its old processes were left.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
import urllib.request
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.failover import Answer, Ask, Progress, asks, run
from benchmarks.running_stack import RunningStack

_TP = ("--tensor-parallel-size", "2")
_PP = ("--pipeline-parallel-size", "2", "--async-scheduling")
_EXPERTS = (*_TP, "--enable-expert-parallel")
_MOVING = ("--enable-eplb", "--num-redundant-experts", "2", "--eplb-step-interval", "4")
LAYOUTS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "tp": (_TP, 2, 1),
    "pp": (_PP, 2, 1),
    "tp-pp": ((*_TP, *_PP), 4, 1),
    "experts": (_EXPERTS, 2, 2),
    "experts-move": ((*_EXPERTS, *_MOVING), 2, 2),
}
"""Flags of two engines, processes of each, and of how many engines processes are killed."""
_STRIKE_AT = 0.25
"""Share of all pieces that have come when a process is killed."""
_BACK_WITHIN = 240.0
"""Seconds after which an engine that is not back counts as lost."""


class Kill(NamedTuple):
    """What became of the streams and of the engine when one of its processes was killed."""

    layout: str
    name: str
    same: int
    streams: int
    pause: float
    """Seconds; the longest in any stream."""
    back: float | None
    """Seconds until another process was that engine, and ready; None: it never was."""
    left: int
    """Processes of the engine from before that still run."""

    @property
    def is_good(self) -> bool:
        """Whether nobody but the engine noticed."""
        return self.same == self.streams and self.back is not None and not self.left


class Killer:
    """Kills a process when a share of the pieces is there."""

    def __init__(self, victim: psutil.Process, pieces: int) -> None:
        self._victim = victim
        self._pieces = pieces
        self.killed_at = 0.0

    async def run(self, progress: Progress) -> None:
        """Wait for the pieces, however long that takes while anything is under way; then kill."""
        for _ in itertools.count():
            if progress.pieces >= self._pieces or progress.done:
                break
            await asyncio.sleep(0.005)
        self.killed_at = time.monotonic()
        self._victim.kill()


def streams(count: int, tokens: int) -> list[Ask]:
    """Return streams of all that differ in how they draw."""
    return [each for each in asks(count, tokens) if each.kind.endswith("stream")][:count]


def strike(
    stack: RunningStack, layout: str, name: str, todo: list[Ask], calm: list[Answer], pieces: int
) -> Kill:
    """Kill one process while the streams run; return what became of them."""
    processes, before = stack.processes(), incarnations(stack.url)
    engine = int(name.split()[1])
    old = [each for title, each in processes.items() if title.startswith(f"engine {engine}")]
    killer = Killer(processes[name], pieces)
    answers = asyncio.run(run(stack.url, todo, killer, Progress()))
    same = sum(
        after.error is None and after.told == peace.told
        for after, peace in zip(answers, calm, strict=True)
    )
    left = psutil.wait_procs(old, timeout=30)[1]
    return Kill(
        layout,
        name,
        same,
        len(todo),
        max(each.longest_pause for each in answers),
        _back_after(stack.url, engine, before, killer.killed_at),
        len(left),
    )


def incarnations(url: str) -> dict[int, int]:
    """Return which process each engine is that is ready."""
    with urllib.request.urlopen(f"{url}/status.json", timeout=60) as answer:
        engines = json.load(answer)["engines"]
    return {each["rank"]: each["incarnation"] for each in engines if each["ready"]}


def _back_after(url: str, engine: int, before: dict[int, int], since: float) -> float | None:
    """Wait until another process is the engine, and ready; return how long that took."""
    while time.monotonic() < since + _BACK_WITHIN:
        now = incarnations(url)
        if now.keys() == before.keys() and now[engine] != before[engine]:
            return time.monotonic() - since
        time.sleep(0.1)
    return None


def main() -> int:
    """Run all ways in turn and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=120, help="of each stream")
    options = parser.parse_args()
    console, kills = Console(), []
    todo = streams(options.streams, options.tokens)
    for layout in options.layouts:
        flags, processes, engines = LAYOUTS[layout]
        names = [
            f"engine {engine}" + (f" worker {rank}" if rank else "")
            for engine in range(engines)
            for rank in range(processes)
        ]
        always = ("--data-parallel-size", "2", "--api-server-count", "1", "--dtype", "float32")
        with RunningStack(*always, *flags, "--log-level", "error", timeout=300) as stack:
            counted = Progress()
            calm = asyncio.run(run(stack.url, todo, None, counted))
            for name in names:
                pieces = int(counted.pieces * _STRIKE_AT)
                kills.append(strike(stack, layout, name, todo, calm, pieces))
                console.print(kills[-1])
            stack.stop()  # which raises if any process is left
    table = Table("engines", "killed", "streams as in peace", "longest pause", "back after", "left")
    for kill in kills:
        back = "never" if kill.back is None else f"{kill.back:.1f} s"
        table.add_row(
            kill.layout, kill.name, f"{kill.same} of {kill.streams}", f"{kill.pause:.1f} s", back,
            str(kill.left),
        )  # fmt: skip
    console.print(table)
    return 0 if all(kill.is_good for kill in kills) else 1


if __name__ == "__main__":
    sys.exit(main())
