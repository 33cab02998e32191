"""Compares engines with and without overlapped steps, in turn within the same minute.

python -m benchmarks.overlap_bench MODEL --streams 64 --engines 2 --rounds 7

Each engine is a process with the real loop parts: core, executor, and the thread that encodes and
sends outputs to a (here: silent) front end. All engines run the same mode at the same time.
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

import zmq
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.messages import AddRequest, SamplingParams
from engine.sender import ConnectFrontEnd, Sender, StepDone
from engine.transport import Transport

MODES = {"off": False, "on": True}


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
        self._vocab_size = executor.info.vocab_size
        self.core = EngineCore(config, executor, rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)
        self.sender = Sender(Transport(config.cluster, zmq.Context()))
        self.sender.outbox.put(ConnectFrontEnd(0, options.address))
        self.sender.start()

    def run(self, streams: int, prompt: int, tokens: int) -> float:
        """Generate and return tokens per second."""
        for id_ in range(streams):
            sampling = SamplingParams(max_tokens=tokens, seed=id_, ignore_eos=True)
            token_ids = [secrets.randbelow(self._vocab_size) for _ in range(prompt)]
            self.core.handle(AddRequest(id_, str(id_), 0, 0, token_ids, sampling))
        began = time.perf_counter()
        while self.core.has_work:
            step = self.core.step()
            self.sender.outbox.put(StepDone(step.stats, step.outputs))
        return streams * tokens / (time.perf_counter() - began)


def engine_process(
    options: argparse.Namespace, start: Barrier, results: "Queue[tuple[str, float]]"
) -> None:
    """Run the modes in turn; every engine of the group begins each run at the same time."""
    engines = {mode: Engine(options, overlap=overlap) for mode, overlap in MODES.items()}
    load = (options.streams, options.prompt, options.tokens)
    for engine in engines.values():
        engine.run(*load)
    for number in range(options.rounds):
        for mode in list(MODES)[:: 1 if number % 2 else -1]:
            start.wait()
            results.put((mode, engines[mode].run(*load)))


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the rate of all engines together, by mode and round."""
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[str, float]] = context.Queue()
    start = context.Barrier(options.engines)
    workers = [
        context.Process(target=engine_process, args=(options, start, results), daemon=True)
        for _ in range(options.engines)
    ]
    for worker in workers:
        worker.start()
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in track(range(options.rounds * len(MODES)), description="runs"):
        of_run = [results.get(timeout=600) for _ in workers]
        (mode,) = {mode for mode, _ in of_run}
        rates[mode].append(sum(rate for _, rate in of_run))
    for worker in workers:
        worker.join()
    return rates


def report(rates: dict[str, list[float]]) -> Iterable[Table]:
    """Yield what to print."""
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    table = Table("overlap", "output tok/s, median", "lowest", "highest")
    for mode, of_mode in rates.items():
        table.add_row(mode, *(f"{f(of_mode):.0f}" for f in (statistics.median, min, max)))
    table.add_row(
        "on / off", *(f"{f(ratios):.3f}" for f in (statistics.median, min, max)), style="bold"
    )
    yield table


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
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        options.address = f"ipc://{directory}/outputs"
        outputs = context.socket(zmq.PULL)
        outputs.bind(options.address)
        outputs.setsockopt(zmq.RCVHWM, 0)
        console = Console()
        for table in report(measure(options)):
            console.print(table)
        outputs.close(linger=0)


if __name__ == "__main__":
    main()
