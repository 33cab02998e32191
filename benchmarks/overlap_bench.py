"""Compares engines with and without overlapped steps, in turn within the same minute.

python -m benchmarks.overlap_bench MODEL --streams 64 --engines 2 --rounds 7

Each engine is a process with the real loop parts: core, executor, and the thread that encodes and
sends outputs to a (here: silent) front end. All engines run the same mode at the same time. The
share of the time that a core without overlap spends outside its executor is also printed: more
than that no overlap can win.
"""

import argparse
import multiprocessing
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import zmq
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.core.engine_core import EngineCore
from engine.executor.environment import settle_environment
from engine.executor.in_process import InProcessExecutor
from engine.executor.interface import Executor, PendingResult
from engine.process.sender import Sender
from engine.scheduler.batch import BatchPlan
from engine.shared.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AddRequest, SamplingParams
from engine.shared.transport import Transport

MODES = {"off": False, "on": True}


class Run(NamedTuple):
    """One mode of one engine in one round."""

    mode: str
    rate: float
    """Tokens per second."""
    outside: float
    """Share of the time spent outside `submit`."""
    cpu: float
    """Processor time of all threads per token, in microseconds: unlike the rate, hardly moved by
    what else runs on the machine."""


class TimedExecutor:
    """An executor that knows how long its steps were being submitted."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.info = executor.info
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Submit a step and note the time that took."""
        began = time.perf_counter()
        pending = self._executor.submit(plan)
        self.seconds += time.perf_counter() - began
        return pending


class Engine:
    """One engine in one of the modes."""

    def __init__(self, options: argparse.Namespace, *, overlap: bool) -> None:
        config = EngineConfig(
            model=ModelConfig(model=options.model, load_format=options.load_format),
            cache=CacheConfig(enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20),
            scheduler=SchedulerConfig(async_scheduling=overlap),
            cluster=ClusterConfig(insecure_cluster=True),
        )
        executor = InProcessExecutor(config, engines_on_node=options.engines)
        self._mode = "on" if overlap else "off"
        self._executor = TimedExecutor(executor)
        self.core = EngineCore(config, self._executor, rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)
        self.sender = Sender(Transport(config.cluster, zmq.Context()))
        self.sender.connect_front_end(0, options.address)
        self.sender.start()

    def run(self, streams: int, prompt: int, tokens: int) -> Run:
        """Generate so many tokens in each of so many streams."""
        vocab_size = self._executor.info.vocab_size
        for id_ in range(streams):
            sampling = SamplingParams(max_tokens=tokens, seed=id_, ignore_eos=True)
            token_ids = [secrets.randbelow(vocab_size) for _ in range(prompt)]
            self.core.handle(AddRequest(id_, str(id_), 0, 0, token_ids, sampling))
        self._executor.seconds = 0.0
        began, cpu_began = time.perf_counter(), time.process_time()
        while self.core.has_work:
            self.sender.say(self.core.step())
        seconds = time.perf_counter() - began
        outside = 1.0 - self._executor.seconds / seconds
        cpu = (time.process_time() - cpu_began) / (streams * tokens)
        return Run(self._mode, streams * tokens / seconds, outside, cpu * 1e6)


def engine_process(options: argparse.Namespace, start: Barrier, results: "Queue[Run]") -> None:
    """Run the modes in turn; every engine of the group begins each run at the same time."""
    engines = {mode: Engine(options, overlap=overlap) for mode, overlap in MODES.items()}
    load = (options.streams, options.prompt, options.tokens)
    for engine in engines.values():
        engine.run(*load)
    for number in range(options.rounds):
        for mode in list(MODES)[:: 1 if number % 2 else -1]:
            start.wait()
            results.put(engines[mode].run(*load))


def measure(options: argparse.Namespace) -> dict[str, list[Run]]:
    """Return what all engines together did, by mode and round."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Run] = context.Queue()
    start = context.Barrier(options.engines)
    workers = [
        context.Process(target=engine_process, args=(options, start, results), daemon=True)
        for _ in range(options.engines)
    ]
    for worker in workers:
        worker.start()
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for _ in track(range(options.rounds * len(MODES)), description="runs"):
        of_run = [results.get(timeout=600) for _ in workers]
        (mode,) = {run.mode for run in of_run}
        outside, cpu = (
            statistics.fmean(getattr(run, name) for run in of_run) for name in ("outside", "cpu")
        )
        runs[mode].append(Run(mode, sum(run.rate for run in of_run), outside, cpu))
    for worker in workers:
        worker.join()
    return runs


def report(runs: dict[str, list[Run]]) -> Iterable[str | Table]:
    """Yield what to print."""
    table = Table("overlap", "output tok/s, median", "lowest", "highest", "CPU us/token, median")
    for mode, of_mode in runs.items():
        rates = [run.rate for run in of_mode]
        cells = [f"{f(rates):.0f}" for f in (statistics.median, min, max)]
        table.add_row(mode, *cells, f"{statistics.median(run.cpu for run in of_mode):.1f}")
    pairs = list(zip(runs["on"], runs["off"], strict=True))
    ratios = [on.rate / off.rate for on, off in pairs]
    cells = [f"{f(ratios):.3f}" for f in (statistics.median, min, max)]
    cpu = statistics.median(on.cpu / off.cpu for on, off in pairs)
    table.add_row("on / off", *cells, f"{cpu:.3f}", style="bold")
    yield table
    outside = min(run.outside for run in runs["off"])
    yield f"outside the executor, without overlap: {outside:.1%} of the time in the best run"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64, help="per engine")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    settle_environment()
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        options.address = f"ipc://{directory}/outputs"
        outputs = context.socket(zmq.PULL)
        outputs.bind(options.address)
        outputs.setsockopt(zmq.RCVHWM, 0)
        console = Console()
        for part in report(measure(options)):
            console.print(part)
        outputs.close(linger=0)


if __name__ == "__main__":
    main()
