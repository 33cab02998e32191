"""What an attack costs a front end: how much it grows, and how long its event loop stands still.

A process of its own watches, so that the attacker's work does not show in the figures:
`python -m tests.hostile.measure PID PORT` says `ready`, watches until its input ends, and prints
what it saw as JSON.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.running_stack import RunningStack

INTERVAL = 0.005
"""Seconds between two looks at the memory, and between two probes of the loop."""

MAX_GROWTH = 64 * 2**20
"""Bytes by which one request may let a front end grow, besides its own body."""
MAX_STALL = 0.1
"""Seconds for which one request may hold up a front end's event loop."""

ATTEMPTS = 4
"""Repeats of an attack: other work on the machine only ever adds to a stall."""

PROBE = b"GET /health HTTP/1.1\r\nHost: probe\r\n\r\n"
_FLAGS = (
    "--executor", "simulated", "--simulated-step-us", "300", "--simulated-token-us", "0",
    "--api-server-count", "1", "--data-parallel-size", "1", "--log-level", "error",
)  # fmt: skip


class Cost(NamedTuple):
    """What was seen while something went on."""

    growth: int
    """Bytes of resident memory at the highest, beyond those at the start."""
    stall: float
    """Longest time in seconds that a probe waited for its answer, less what the loop's thread and
    the probe waited for a processor that others had."""
    probes: int


class Watch:
    """Watches a front end while it is entered; `cost` says afterwards what was seen."""

    cost: Cost

    def __init__(self, pid: int, url: str) -> None:
        self._command = [sys.executable, "-m", __name__, str(pid), str(urlsplit(url).port)]

    def __enter__(self) -> "Watch":
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        output, _ = self._process.communicate(timeout=60)
        if kind is None:
            self.cost = Cost(**json.loads(output))


@contextlib.contextmanager
def front_end(*flags: str) -> Iterator[tuple[RunningStack, int]]:
    """Run a small stack with one front end; yield it with the front end's process id."""
    with RunningStack(*_FLAGS, *flags) as stack:
        yield stack, stack.processes()["api 0"].pid


def cost_of(
    attack: Callable[[], object], stack: RunningStack, pid: int, attempts: int = ATTEMPTS
) -> Cost:
    """Return the largest growth and the smallest stall of some attempts.

    Attempts end with the first that stays within the bound for stalls: only the first one finds
    the memory as small as it was, and a stall that the attack causes is in all of them.
    """
    costs: list[Cost] = []
    while len(costs) < attempts and not (costs and costs[-1].stall <= MAX_STALL):
        with Watch(pid, stack.url) as watch:
            attack()
        costs.append(watch.cost)
    return Cost(
        max(cost.growth for cost in costs),
        min(cost.stall for cost in costs),
        sum(cost.probes for cost in costs),
    )


# -- the process that watches ----------------------------------------------------------------------


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _watch_memory(pid: int, over: threading.Event, highest: list[int]) -> None:
    while not over.wait(INTERVAL):
        highest[0] = max(highest[0], _resident(pid))


def _processor_waits(pid: int) -> float:
    """Return the seconds that the main thread of a process and this one waited for a processor."""
    waited = 0
    for thread in (f"{pid}/task/{pid}", "thread-self"):
        with open(f"/proc/{thread}/schedstat", encoding="ascii") as file:
            waited += int(file.read().split()[1])
    return waited / 1e9


def _probe(connection: socket.socket, pid: int) -> float:
    began, waited = time.monotonic(), _processor_waits(pid)
    connection.sendall(PROBE)
    answer = b""
    while not answer.endswith(b"}"):
        piece = connection.recv(4096)
        if not piece:
            raise ConnectionError("the front end closed the connection of its probe")
        answer += piece
    return max(0.0, time.monotonic() - began - (_processor_waits(pid) - waited))


def _main(pid: int, port: int) -> None:
    over = threading.Event()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _probe(connection, pid)
        before = _resident(pid)
        highest = [before]
        memory = threading.Thread(target=_watch_memory, args=(pid, over, highest))
        ending = threading.Thread(target=lambda: (sys.stdin.read(), over.set()))
        memory.start()
        ending.start()
        print("ready", flush=True)
        longest, probes = 0.0, 0
        while not over.wait(INTERVAL):
            longest, probes = max(longest, _probe(connection, pid)), probes + 1
        longest = max(longest, _probe(connection, pid))  # what came last has been worked through
        memory.join()
    print(json.dumps(Cost(highest[0] - before, longest, probes + 1)._asdict()))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
