"""Brings a real stack into the states that trigger alerts, and records its metrics.

    python -m tests.deploy.record_alerts            # all states, some twelve minutes
    python -m tests.deploy.record_alerts hang queue

Writes `recorded/STATE.yaml`, which `test_alerts_recorded.py` evaluates with Prometheus.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL
from tests.deploy.recording import Recorder
from tests.support.commands import start_swell
from tests.support.http import ADMIN_KEY, call, completion, fetch
from tests.support.metrics import metric, total
from tests.support.ports import port_of_a_coordinator
from tests.support.waiting import until

SLOTS = 4
MINUTE = 60 // 30
"""Samples that count as one minute."""

State = Callable[["Stack"], None]
STATES: dict[str, tuple[State, "Setup"]] = {}
Process = subprocess.Popen[bytes]


class Setup:
    """Configuration of the stack of a state."""

    def __init__(
        self, expected: int, engines: int | None = None, step_us: int = 20000,
        engine: tuple[str, ...] = (), front: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.expected = expected
        self.engines = expected if engines is None else engines
        self.engine = ("--simulated-step-us", str(step_us), *engine)
        self.front = front


def state(expected: int, **more: object) -> Callable[[State], State]:
    """Register a state; the function's docstring describes it in the recording."""

    def register(function: State) -> State:
        STATES[function.__name__] = (function, Setup(expected, **more))  # type: ignore[arg-type]
        return function

    return register


class Stack:
    """A coordinator, engines and two API servers, each in a separate process."""

    def __init__(self, folder: Path, setup: Setup, running: ExitStack) -> None:
        self.folder = folder
        self._setup = setup
        self._running = running
        key = folder / "key"
        key.write_text("a secret of a recording")
        self._join = (
            "--coordinator", f"127.0.0.1:{port_of_a_coordinator()}", "--cluster-key-file", str(key),
            "--engine-timeout", "3",
        )  # fmt: skip
        self.coordinator = self.coordinate()
        self.engines = {rank: self.engine(rank) for rank in range(setup.engines)}
        self.fronts = [
            RunningStack(
                *self._join, "--min-ready-engines", str(max(1, setup.engines)),
                "--admin-key", ADMIN_KEY,
                *setup.front, command="api-server",
            )
            for _ in range(2)
        ]  # fmt: skip
        self.urls = [running.enter_context(front).url for front in self.fronts]
        self.recorder = Recorder(dict(zip("ab", self.urls, strict=True)))

    def _start(self, *arguments: str) -> Process:
        process = start_swell(*arguments)
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        return process

    def coordinate(self) -> Process:
        return self._start(
            "coordinator", *self._join, "--expected-engines", str(self._setup.expected)
        )

    def engine(self, rank: int, *flags: str, simulated: bool = True) -> Process:
        """Start an engine as configured for this state; additional flags take precedence."""
        how = ("--executor", "simulated", "--max-num-seqs", str(SLOTS)) if simulated else ()
        own = self._setup.engine if simulated else ()
        return self._start(
            "engine", *self._join, "--data-parallel-rank", str(rank), *how, *own, *flags
        )

    @contextmanager
    def load(self, clients: int, tokens: int, rank: int | None = None) -> Iterator[None]:
        """Run clients that each request one stream after another until the block ends."""
        over = threading.Event()

        def run(number: int) -> None:
            body = completion(f"Scene {number}", tokens, stream=True)
            while not over.is_set():
                fetch(f"{self.urls[number % 2]}/v1/completions", body, rank=rank)
                over.wait(0.1)

        threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()

    def goes_on(self, minutes: float, mark: str | None = None) -> None:
        """Record for this many minutes, then mark the last sample if a name is given."""
        self.recorder.goes_on(int(minutes * MINUTE))
        if mark is not None:
            self.recorder.mark(mark)


# -- states ----------------------------------------------------------------------------------------


@state(3)
def healthy(stack: Stack) -> None:
    """Three engines under a load that they carry."""
    with stack.load(6, 40):
        stack.goes_on(22, "end")


@state(3)
def lost(stack: Stack) -> None:
    """Of three engines under load one is killed and not started again, later the others too."""
    with stack.load(6, 40):
        stack.goes_on(6, "healthy")
        stack.engines[0].kill()
        stack.goes_on(16, "one lost")
        for rank in (1, 2):
            stack.engines[rank].kill()
        stack.goes_on(12, "all lost")


@state(4, engines=3)
def absent(stack: Stack) -> None:
    """Of four engines one has never come, and one ended in order and nobody came in its place."""
    stack.engines[2].terminate()
    stack.goes_on(14, "end")


@state(2)
def unheard(stack: Stack) -> None:
    """The coordinator is killed under load, and started again."""
    with stack.load(8, 40):
        stack.goes_on(6, "healthy")
        stack.coordinator.kill()
        stack.goes_on(12, "lost")
        stack.coordinate()
        stack.goes_on(6, "back")


@state(1)
def queue(stack: Stack) -> None:
    """One engine of four slots and 60 clients."""
    with stack.load(2, 40):
        stack.goes_on(12, "healthy")
    with stack.load(60, 40):
        stack.goes_on(9, "grown")
        stack.goes_on(20, "steady")


@state(1, front=("--max-queue", "4"))
def refusing(stack: Stack) -> None:
    """One engine of four slots and 40 clients, of whom four may wait at each API server."""
    with stack.load(40, 20):
        stack.goes_on(14, "end")


@state(2, engine=("--num-kv-blocks", "40", "--max-num-seqs", "16"))
def memory(stack: Stack) -> None:
    """Engines of 640 tokens' KV memory, with clients that want eight times as much."""
    with stack.load(24, 400):
        stack.goes_on(16, "end")


@state(2)
def hang(stack: Stack) -> None:
    """One of two engines is in a step that does not end."""
    stack.engines[1].kill()
    stack.engines[1].wait()
    stack.engines[1] = stack.engine(1, "--simulated-step-us", "600000000")
    until(lambda: metric(stack.urls[0], "engine_up").get("1"), "it is ready")
    with stack.load(4, 40, rank=0), stack.load(2, 40, rank=1):
        stack.goes_on(14, "end")


@state(2)
def paused(stack: Stack) -> None:
    """One of two engines is paused by its operator, and keeps what it has."""
    with stack.load(4, 40, rank=0), stack.load(2, 900, rank=1):
        until(lambda: metric(stack.urls[0], "num_requests_running").get("1"), "it has requests")
        pause = {"name": "pause", "rank": 1, "arguments": {"mode": "keep"}}
        call(f"{stack.urls[0]}/admin/utilities", pause)
        stack.goes_on(14, "end")


@state(1, front=("--resume-timeout", "0.5"))
def dying(stack: Stack) -> None:
    """The only engine is killed and started again, five times, while it has streams."""
    with stack.load(12, 200):
        stack.goes_on(4, "healthy")
        for number in range(1, 6):
            stack.engines[0].kill()
            stack.engines[0].wait()
            stack.engines[0] = stack.engine(0)
            until(lambda: starts(stack) == number, "it is back")  # noqa: B023
            until(lambda: total(stack.urls[0], "num_requests_running") > 2, "it has streams")
            stack.goes_on(1)
        stack.recorder.mark("end")


def starts(stack: Stack) -> float:
    """Return the number of restarts of the only engine, which must be ready."""
    if metric(stack.urls[0], "engine_up").get("0") != 1:
        return 0
    return metric(stack.urls[0], "engine_restarts_total")["0"]


@state(2, step_us=100000, engine=("--drain-timeout", "300"))
def draining(stack: Stack) -> None:
    """One of two engines is to end, and its answers are long."""
    with stack.load(2, 900, rank=1):
        until(lambda: metric(stack.urls[0], "num_requests_running").get("1"), "it has requests")
    stack.goes_on(4, "healthy")
    stack.engines[1].terminate()
    stack.goes_on(18, "end")


@state(2, engines=1)
def unreadable(stack: Stack) -> None:
    """A second engine finds weights that it cannot read, a pipe here, and ends."""
    model = stack.folder / BUNDLED_MODEL.name
    shutil.copytree(BUNDLED_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    os.mkfifo(model / "model.safetensors")
    stack.engine(1, str(model), simulated=False)
    until(lambda: metric(stack.urls[0], "engine_starting").get("1"), "it has joined")
    stack.goes_on(34, "end")


@state(2, engines=1)
def loading(stack: Stack) -> None:
    """A second engine loads its model with a 14th of a CPU's time, as under a quota."""
    came = stack.engine(1, simulated=False)
    until(lambda: metric(stack.urls[0], "engine_starting").get("1"), "it has joined")
    with throttled(came):
        stack.goes_on(33, "end")


@contextmanager
def throttled(process: Process, share: float = 0.07) -> Iterator[None]:
    """Limit a process to a share of the time by stopping and continuing it."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            process.send_signal(signal.SIGSTOP)
            over.wait(0.5 * (1 - share))
            process.send_signal(signal.SIGCONT)
            over.wait(0.5 * share)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@state(2, engines=1)
def refused(stack: Stack) -> None:
    """A second engine comes with other weights than the first, and is sent away."""
    came = stack.engine(1, simulated=False)
    until(lambda: came.poll() is not None, "it has been sent away")
    stack.goes_on(14, "end")


@state(1)
def api_dying(stack: Stack) -> None:
    """One of two API servers has a process that is killed four times."""
    stack.goes_on(2, "healthy")
    for number in range(1, 5):
        os.kill(stack.fronts[0].processes()["api 0"].pid, signal.SIGKILL)
        until(lambda: restarts(stack) == number, "it is back")  # noqa: B023
        stack.goes_on(1)
    stack.recorder.mark("end")


def restarts(stack: Stack) -> float:
    """Return the number of restarts of the process; 0 if there is no response."""
    try:
        return total(stack.urls[0], "api_server_restarts_total")
    except (OSError, AssertionError):
        return 0


@state(1, front=("--response-store-bytes", "1000"))
def unkept(stack: Stack) -> None:
    """A store that is smaller than any response."""
    stack.goes_on(2, "healthy")
    for _ in range(12):
        call(f"{stack.urls[0]}/v1/responses", {"input": "hi", "max_output_tokens": 1})
        stack.goes_on(1)
    stack.recorder.mark("end")


@state(2)
def unscraped(stack: Stack) -> None:
    """Both API servers are killed."""
    stack.goes_on(6, "healthy")
    for front in stack.fronts:
        front.kill()
    stack.goes_on(14, "end")


@state(0, front=("--cold-start-timeout", "600"))
def cold(stack: Stack) -> None:
    """There is no engine until it is needed, and then none comes."""
    stack.goes_on(10, "healthy")
    with stack.load(2, 40):
        stack.goes_on(18, "end")


def record(name: str) -> None:
    """Record one state."""
    play, setup = STATES[name]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        stack = Stack(Path(folder), setup, running)
        with stack.recorder.running():
            play(stack)
        kept = stack.recorder.recorded(" ".join((play.__doc__ or "").split()))
        kept.write(name)
        print(name, kept.marks, len(kept.series), "series", flush=True)
        for front in stack.fronts:
            front.kill()


if __name__ == "__main__":
    for each in sys.argv[1:] or STATES:
        record(each)
