"""One run of `swell bench`: prepare, start the sending processes, watch them, sum up."""

import asyncio
import contextlib
import math
import multiprocessing
import multiprocessing.connection
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from server.bench import worker
from server.bench.config import BenchConfig, BenchError, base_address, request_headers
from server.bench.connection import HttpClient
from server.bench.datasets import make_prompts, request_body
from server.bench.server_tokens import ServerTokens
from server.bench.summary import ClientCost, Record
from server.bench.worker import Finished, Report, WarmedUp, WorkerMessage, WorkerPlan

_START_SECONDS = 0.2
_REFRESH_SECONDS = 0.1
_STOP_SECONDS = 5.0

_decode = msgspec.msgpack.Decoder(WorkerMessage).decode


@dataclass
class Progress:
    """What is known of a run so far."""

    planned: int
    started_at: float = 0.0
    """Monotonic time of the start of the measurement; 0 before."""
    records: list[Record] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)
    """Requests in flight, by process."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Output tokens so far, by process."""
    costs: dict[int, ClientCost] = field(default_factory=dict)
    model: str = ""
    parent_cpu_seconds: float = 0.0
    """CPU time of this process, the live display's, during the measurement."""


Watcher = Callable[[Progress], None]


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds after the start at which `count` requests are due, in order.

    The gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / `rate`: shape
    1 gives exponential gaps, a Poisson process; the coefficient of variation of the gaps is
    1 / sqrt(burstiness). They are scaled so that the last request is due at count / rate, so
    that short runs too have the rate that was asked for. An infinite rate makes all due at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator = random.Random(seed)
    scale = 1.0 / (rate * burstiness)
    times = list(accumulate(generator.gammavariate(burstiness, scale) for _ in range(count)))
    stretch = count / rate / times[-1] if times[-1] > 0 else 1.0
    return [time * stretch for time in times]


def extra_fields(config: BenchConfig) -> dict[str, Any]:
    """Return what is merged into every request body.

    Raises:
        BenchError: it is no JSON object, or sets what has a setting of its own.
    """
    text = config.workload.extra_body
    try:
        extra = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.DecodeError as error:
        raise BenchError(f"--extra-body: {error}") from error
    if owned := extra.keys() & {"stream", "stream_options", "n"}:
        raise BenchError(f"--extra-body cannot set {', '.join(sorted(owned))}")
    return extra


async def make_bodies(config: BenchConfig) -> tuple[str, list[bytes]]:
    """Return the model's name and the bodies of all requests, those of the warm-up at the end.

    Raises:
        BenchError: see `request_headers`, `extra_fields` and `datasets.make_prompts`.
    """
    extra = extra_fields(config)
    client = HttpClient(base_address(config.target), request_headers(config.target))
    try:
        tokens = ServerTokens(client, config.target.model)
        model = await tokens.find_model()
        chat = config.target.backend == "openai-chat"
        prompts = await make_prompts(config.workload, tokens, as_text=chat)
    finally:
        client.close()
    return model, [
        request_body(config.workload, prompt, model, chat=chat, extra=extra) for prompt in prompts
    ]


def make_plans(config: BenchConfig, bodies: list[bytes]) -> list[WorkerPlan]:
    """Return what each sending process has to do."""
    workload, traffic = config.workload, config.traffic
    measured, warmups = bodies[: workload.num_prompts], bodies[workload.num_prompts :]
    schedule = arrival_times(len(measured), traffic.request_rate, traffic.burstiness, workload.seed)
    limit = traffic.max_concurrency
    count = min(traffic.processes, limit or traffic.processes)
    return [
        WorkerPlan(
            config=config,
            bodies=measured,
            schedule=schedule,
            warmups=warmups[index::count],
            share=slice(index, None, count),
            slots=None if limit is None else limit // count + (index < limit % count),
        )
        for index in range(count)
    ]


class _Workers:
    """The sending processes and the pipes to them."""

    def __init__(self, plans: list[WorkerPlan]) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept here: with its last owner in this process, the children could not open it.
        self._counter = context.Value("q", 0)
        self.pipes: dict[Connection, int] = {}
        self._processes: list[BaseProcess] = []
        for index, plan in enumerate(plans):
            pipe, end = context.Pipe()
            process = context.Process(
                target=worker.main,
                args=(plan, self._counter, end),
                name=f"bench {index}",
                daemon=True,
            )
            process.start()
            end.close()
            self.pipes[pipe] = index
            self._processes.append(process)

    def receive(self, timeout: float) -> list[tuple[int, WorkerMessage]]:
        """Return what came within `timeout` seconds.

        Raises:
            BenchError: a process ended before it had finished.
        """
        received = []
        for pipe in multiprocessing.connection.wait(list(self.pipes), timeout):
            assert isinstance(pipe, Connection)
            index = self.pipes[pipe]
            try:
                message = _decode(pipe.recv_bytes())
            except EOFError:
                raise BenchError(f"sending process {index} died") from None
            received.append((index, message))
            if isinstance(message, Finished):
                del self.pipes[pipe]
                pipe.close()
        return received

    def tell(self, message: float | None) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def run(config: BenchConfig, watch: Watcher) -> Progress:
    """Run the whole benchmark and return what was measured.

    An interrupt from the keyboard cuts off what still runs; the result is then partial.

    Args:
        watch: called several times a second.

    Raises:
        BenchError: nothing could be measured.
        ValueError: the address of the target is none.
    """
    progress = Progress(planned=config.workload.num_prompts)
    watch(progress)
    progress.model, bodies = asyncio.run(make_bodies(config))
    workers = _Workers(make_plans(config, bodies))
    try:
        _wait_for_warm_up(workers, progress, watch)
        cpu = time.process_time()
        progress.started_at = time.monotonic() + _START_SECONDS
        workers.tell(progress.started_at)
        with _noted_interrupt() as interrupted:
            _collect(workers, progress, watch, interrupted)
        progress.parent_cpu_seconds = time.process_time() - cpu
    finally:
        workers.close()
    progress.records.sort(key=lambda record: record.index)
    return progress


def _wait_for_warm_up(workers: _Workers, progress: Progress, watch: Watcher) -> None:
    waiting = len(workers.pipes)
    succeeded, errors = 0, dict[str, str]()
    while waiting:
        for _, message in workers.receive(_REFRESH_SECONDS):
            if isinstance(message, WarmedUp):
                waiting -= 1
                succeeded += message.succeeded
                errors |= message.errors
        watch(progress)
    if errors and not succeeded:
        told = "; ".join(f"{kind} {detail}".strip() for kind, detail in errors.items())
        raise BenchError(f"every request of the warm-up failed: {told}")


@contextlib.contextmanager
def _noted_interrupt() -> Iterator[threading.Event]:
    """Note the first interrupt, where one would raise: within a read it would split a message."""
    noted = threading.Event()

    def note(*_: object) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    raising = [
        signum
        for signum in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(signum) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    ]
    for signum in raising:
        signal.signal(signum, note)
    try:
        yield noted
    finally:
        for signum in raising:
            signal.signal(signum, signal.default_int_handler)


def _collect(
    workers: _Workers, progress: Progress, watch: Watcher, interrupted: threading.Event
) -> None:
    was_told = False
    while workers.pipes:
        if interrupted.is_set() and not was_told:
            workers.tell(None)
            was_told = True
        for index, message in workers.receive(_REFRESH_SECONDS):
            if isinstance(message, Report):
                progress.records += message.records
                progress.running[index] = message.running
                progress.tokens[index] = message.tokens
            elif isinstance(message, Finished):
                progress.costs[index] = message.cost
        watch(progress)
