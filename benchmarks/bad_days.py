"""Failure scenarios of a node, run in turn on real stacks under load; prints a table.

Each "day" starts a stack of two engines and two API servers, loads it, takes something away (the
reader of its log, its disk, its files, its interpreter, its descriptors, the time of day, or its
supervisor or coordinator) and kills processes meanwhile. It reports failed requests, and the
seconds from the start of the disturbance until all processes run, all engines serve and a round of
requests is answered.

    python -m benchmarks.bad_days
    python -m benchmarks.bad_days --only interpreter --clients 4
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.hostile.disks import small_disk
from benchmarks.preload import ShiftedClock
from benchmarks.running_stack import RunningStack

RECOVERY_SECONDS = 30.0
"""Seconds within which a stack must be whole again."""

STEADY = 1.5
"""Seconds for which a whole stack's processes must stay the same."""

ALL_PROCESSES = {"supervisor", "coordinator", "engine 0", "engine 1", "api 0", "api 1"}
FLAGS = (
    "--executor", "simulated", "--simulated-step-us", "10000", "--data-parallel-size", "2",
    "--min-ready-engines", "2",
)  # fmt: skip


MODEL = "swell-shakespeare"
CLIENT_TIMEOUT = 60.0
"""Client timeout in seconds."""


class Load:
    """Clients that send requests one after the other, each on a new connection."""

    def __init__(self, url: str, clients: int) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def _run(self, seed: int) -> None:
        while not self._over.is_set():
            try:
                ask(self._url, 60, seed)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failures.append(repr(error))
                self._over.wait(0.1)
            else:
                self.answered += 1

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def ask(url: str, tokens: int, seed: int, rank: int | None = None) -> None:
    """Send one request, to any engine or one of a given rank, and wait for its answer.

    Raises:
        OSError, http.client.HTTPException: there was no complete answer.
        ValueError: the answer is wrong.
    """
    body = {"model": MODEL, "prompt": f"Act {seed}", "max_tokens": tokens, "seed": seed}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=CLIENT_TIMEOUT) as answer:
        num_tokens = json.loads(answer.read())["usage"]["completion_tokens"]
    if num_tokens != tokens:
        raise ValueError(f"{num_tokens} of {tokens} tokens")


class Unusable(Exception):
    """This machine cannot run a scenario; the message states why."""


@dataclass
class Outcome:
    """Result of a day."""

    answered: int
    failures: list[str]
    recovered_after: float | None
    """Seconds from the start of the disturbance; None if it was not whole in time."""
    stopped_cleanly: bool


# -- days ----------------------------------------------------------------------------------------


@dataclass
class Target:
    """A running stack, and resources that the disturbance may need."""

    stack: RunningStack
    directory: Path
    """Given to the stack as --socket-dir."""
    log: int | None = None
    """Read end of the pipe that is the stack's stderr."""
    log_disk: Path | None = None
    """Small file system that holds the stack's log."""
    interpreter: Path | None = None
    clock: ShiftedClock | None = None
    killed: list[psutil.Process] = field(default_factory=list)

    def kill(self, *names: str) -> None:
        """Kill processes by title."""
        processes = self.stack.processes()
        for name in names:
            self.killed.append(processes[name])
            processes[name].kill()

    def ready(self) -> tuple[int, int]:
        """Return how many engines and front ends the cluster considers ready.

        Raises:
            OSError: no front end answered.
        """
        with urllib.request.urlopen(f"{self.stack.url}/status.json", timeout=5) as answer:
            status = json.load(answer)
        return sum(engine["ready"] for engine in status["engines"]), status["num_front_ends"]

    def healthy_processes(self) -> set[int] | None:
        """Return the process ids if all processes run and every engine answers, else None."""
        processes = self.stack.processes()
        if set(processes) != ALL_PROCESSES or any(
            each in self.killed for each in processes.values()
        ):
            return None
        try:
            if self.ready() != (2, 2):
                return None
            for seed in range(16):
                ask(self.stack.url, 2, seed, rank=seed % 2)
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None
        return {each.pid for each in processes.values()}


@contextmanager
def plain(
    directory: Path,
    log: int | None = None,
    interpreter: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    """A stack as started in a container or a terminal."""
    sockets = directory / "sockets"
    flags = (*FLAGS, "--socket-dir", str(sockets))
    with RunningStack(*flags, log=log, interpreter=interpreter, environment=environment) as stack:
        yield Target(stack, sockets)


@contextmanager
def logging_to_a_pipe(directory: Path) -> Iterator[Target]:
    """A stack whose log is a pipe, read by another process or not at all."""
    reading, writing = os.pipe()
    try:
        with plain(directory, writing) as target:
            target.log = reading
            yield target
    finally:
        os.close(writing)
        with contextlib.suppress(OSError):
            os.close(reading)


@contextmanager
def logging_to_nothing(directory: Path) -> Iterator[Target]:
    """A stack started without stdin, stdout and stderr."""
    wrapper = directory / "closed"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@" 0<&- 1>&- 2>&-\n')
    wrapper.chmod(0o700)
    with Path(os.devnull).open("wb") as null, plain(directory, null.fileno(), wrapper) as target:
        yield target


@contextmanager
def logging_to_a_full_disk(directory: Path) -> Iterator[Target]:
    """A stack whose log disk is always full."""
    with Path("/dev/full").open("wb") as full, plain(directory, full.fileno()) as target:
        yield target


@contextmanager
def logging_to_a_small_disk(directory: Path) -> Iterator[Target]:
    """A stack whose log is on a 1 MB file system."""
    with contextlib.ExitStack() as opened:
        try:
            disk = opened.enter_context(small_disk(directory / "disk", 1))
        except OSError as error:
            raise Unusable(str(error)) from error
        log = opened.enter_context((disk / "log").open("ab"))
        target = opened.enter_context(plain(directory, log.fileno()))
        target.log_disk = disk
        yield target


@contextmanager
def with_its_own_interpreter(directory: Path) -> Iterator[Target]:
    """A stack in a virtual environment that is upgraded while it runs."""
    environment = directory / "environment"
    (environment / "bin").mkdir(parents=True)
    prefix = Path(sys.prefix)
    (environment / "lib").symlink_to(prefix / "lib")
    if (prefix / "pyvenv.cfg").exists():
        shutil.copy(prefix / "pyvenv.cfg", environment)
    interpreter = environment / "bin" / "python"
    interpreter.symlink_to(Path(sys.executable).resolve())
    with plain(directory, interpreter=interpreter) as target:
        target.interpreter = interpreter
        yield target


@contextmanager
def with_a_clock_that_jumps(directory: Path) -> Iterator[Target]:
    """A stack whose time of day can be changed."""
    try:
        clock = ShiftedClock(directory)
    except OSError as error:
        raise Unusable(f"needs a C compiler: {error}") from error
    with plain(directory, environment=clock.environment) as target:
        target.clock = clock
        yield target


def kill_an_engine(target: Target) -> None:
    """Kill an engine."""
    target.kill("engine 1")


def close_the_reader(target: Target) -> None:
    """Close the log's reader; then kill an engine."""
    assert target.log is not None
    os.close(target.log)
    target.kill("engine 1")


def stop_reading(target: Target) -> None:
    """Let the log's pipe fill up; then kill an engine."""
    assert target.log is not None
    pipe = os.open(f"/proc/{target.stack.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 1024)
    os.close(pipe)
    target.kill("engine 1")


def fill_the_disk(target: Target) -> None:
    """Fill the log's disk for three seconds, and kill an engine meanwhile."""
    assert target.log_disk is not None
    junk = target.log_disk / "junk"
    with junk.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    target.kill("engine 1")
    time.sleep(3)
    junk.unlink()


def _remove_all(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)  # files that are recreated meanwhile may stay
        else:
            entry.unlink()


def clean_up_files(target: Target) -> None:
    """Remove all files of the node; then kill an engine and the coordinator."""
    _remove_all(target.directory)
    target.kill("engine 1", "coordinator")


def clean_up_files_of_front_ends(target: Target) -> None:
    """Remove all files of the node; then kill an API server."""
    _remove_all(target.directory)
    target.kill("api 1")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # it may have accepted the connection before it died
            if target.ready()[1] != 2:
                break
        time.sleep(0.02)  # the dead one counts until it is noticed


def remove_the_interpreter(target: Target) -> None:
    """Remove the interpreter for two seconds, and kill an engine meanwhile."""
    assert target.interpreter is not None
    renamed = target.interpreter.with_name("aside")
    target.interpreter.rename(renamed)
    target.kill("engine 1")
    time.sleep(2)
    renamed.rename(target.interpreter)


def _limit_the_supervisor(target: Target, which: int, limit: int) -> None:
    supervisor = psutil.Process(target.stack.process.pid)
    before = supervisor.rlimit(which)
    assert before is not None
    supervisor.rlimit(which, (limit, before[1]))
    target.kill("engine 1", "coordinator")
    time.sleep(2)
    supervisor.rlimit(which, before)


def run_out_of_descriptors(target: Target) -> None:
    """Exhaust the supervisor's descriptors for two seconds; kill an engine and the coordinator."""
    _limit_the_supervisor(target, psutil.RLIMIT_NOFILE, 3)


def run_out_of_memory(target: Target) -> None:
    """Exhaust the supervisor's memory for two seconds; kill an engine and the coordinator."""
    _limit_the_supervisor(target, psutil.RLIMIT_AS, 1 << 20)


def set_the_clock(target: Target) -> None:
    """Set the clock a day ahead and back; kill an engine and the coordinator in between."""
    assert target.clock is not None
    target.clock.shift(86_400)
    target.kill("engine 1", "coordinator")
    time.sleep(2)
    target.clock.shift(-86_400)


def _stop(target: Target, name: str, seconds: float) -> None:
    stopped = target.stack.processes()[name]
    stopped.send_signal(signal.SIGSTOP)
    target.kill("engine 1")
    time.sleep(seconds)
    stopped.send_signal(signal.SIGCONT)


def stop_the_supervisor(target: Target) -> None:
    """Stop the supervisor for three seconds, and kill an engine meanwhile."""
    _stop(target, "supervisor", 3)


def stop_the_coordinator(target: Target) -> None:
    """Stop the coordinator for eight seconds, and kill an engine meanwhile."""
    _stop(target, "coordinator", 8)


@dataclass(frozen=True)
class Scenario:
    """A configuration of a stack, and a disturbance."""

    setting: Callable[[Path], AbstractContextManager[Target]]
    disturbance: Callable[[Target], None]
    kills_a_front_end: bool = False
    """Whether it kills a front end, breaking its connections."""


SCENARIOS = {
    "stderr closed": Scenario(logging_to_nothing, kill_an_engine),
    "stderr's reader gone": Scenario(logging_to_a_pipe, close_the_reader),
    "stderr not read": Scenario(logging_to_a_pipe, stop_reading),
    "log disk always full": Scenario(logging_to_a_full_disk, kill_an_engine),
    "log disk full for 3 s": Scenario(logging_to_a_small_disk, fill_the_disk),
    "files cleaned": Scenario(plain, clean_up_files),
    "files cleaned, API server": Scenario(
        plain, clean_up_files_of_front_ends, kills_a_front_end=True
    ),
    "interpreter missing": Scenario(with_its_own_interpreter, remove_the_interpreter),
    "no descriptors": Scenario(plain, run_out_of_descriptors),
    "no memory": Scenario(plain, run_out_of_memory),
    "clock jumps": Scenario(with_a_clock_that_jumps, set_the_clock),
    "supervisor stopped": Scenario(plain, stop_the_supervisor),
    "coordinator stopped": Scenario(plain, stop_the_coordinator),
}


# -- results -------------------------------------------------------------------------------------


def run_scenario(
    scenario: Scenario, clients: int, recovery_seconds: float = RECOVERY_SECONDS
) -> Outcome:
    """Run a day on its own stack.

    Args:
        clients: number of concurrent requests.
        recovery_seconds: seconds within which the stack must be whole again.

    Raises:
        Unusable: this machine cannot run the scenario.
    """
    with TemporaryDirectory(prefix="bad-day-") as name, scenario.setting(Path(name)) as target:
        with Load(target.stack.url, clients) as load:
            while load.answered < clients and not load.failures:
                time.sleep(0.05)
            time.sleep(1.5)  # longer than all one-second intervals
            started_at = time.monotonic()
            scenario.disturbance(target)
            recovered_at = wait_until_healthy(target, started_at + recovery_seconds)
            recovered_after = None if recovered_at is None else recovered_at - started_at
        with contextlib.suppress(Exception):
            target.stack.stop()
        is_clean = target.stack.process.returncode == 0 and not list(target.directory.iterdir())
        return Outcome(load.answered, load.failures, recovered_after, is_clean)


def wait_until_healthy(target: Target, deadline: float) -> float | None:
    """Wait until the stack is whole and stays so; return the time, None if not in time."""
    while time.monotonic() < deadline:
        first = target.healthy_processes()
        recovered_at = time.monotonic()
        if first is None:
            time.sleep(0.1)
            continue
        time.sleep(STEADY)  # a process in a crash loop exists intermittently
        if target.healthy_processes() == first:
            return recovered_at
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="days whose name contains this")
    parser.add_argument("--clients", type=int, default=8, help="requests under way at once")
    options = parser.parse_args()
    console = Console()
    table = Table("day", "what was done", "answered", "failed", "whole after", "ended cleanly")
    is_fine = True
    for name, scenario in SCENARIOS.items():
        if options.only not in name:
            continue
        console.print(f"{name} ...")
        what = " ".join((scenario.disturbance.__doc__ or "").split())
        try:
            outcome = run_scenario(scenario, options.clients)
        except Unusable as error:
            table.add_row(name, what, "", "", str(error), "")
            continue
        fails = len(outcome.failures)
        is_fine &= outcome.recovered_after is not None and outcome.stopped_cleanly
        is_fine &= fails <= (options.clients if scenario.kills_a_front_end else 0)
        after = "never" if outcome.recovered_after is None else f"{outcome.recovered_after:.1f} s"
        clean = "yes" if outcome.stopped_cleanly else "no"
        table.add_row(name, what, str(outcome.answered), str(fails), after, clean)
        for failure in sorted(set(outcome.failures))[:3]:
            console.print(f"  {failure}", highlight=False, soft_wrap=True)
    console.print(table)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
