"""One run of `swell bench`: prepares, starts the sending processes, monitors and summarizes."""

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
from multiprocessing.sharedctypes import Synchronized

import msgspec
import uvloop

from engine.shared.process_state import freeze_heap
from server.bench.client import complete
from server.bench.config import BenchConfig, BenchError, TargetConfig
from server.bench.connection import HttpClient
from server.bench.datasets import ServerTokens, make_prompts, request_bodies
from server.bench.summary import ClientCost, Record, percentile

_START_SECONDS = 0.2
_REFRESH_SECONDS = 0.1
_REPORT_SECONDS = 0.25
_TICK_SECONDS = 0.02
_STOP_SECONDS = 5.0


class _WarmedUp(msgspec.Struct):
    """First message of a sending process, which then waits for the start."""

    succeeded: int
    errors: dict[str, str]


class Report(msgspec.Struct):
    """What a sending process has done since its last report."""

    records: list[Record] = []
    running: int = 0
    tokens: int = 0
    """Output tokens so far; for running requests the number of deltas."""
    cost: ClientCost | None = None
    """Set in the last report, when all requests have ended or were cut off."""


@dataclass
class Progress:
    """Progress of a run."""

    planned: int
    started_at: float = 0.0
    """Monotonic time of the start of the measurement; 0 before it."""
    records: list[Record] = field(default_factory=list)
    newest: dict[int, Report] = field(default_factory=dict)
    """Last report of each sending process."""
    model: str = ""
    parent_cpu_seconds: float = 0.0
    """CPU time of this process, including the live display, during the measurement."""

    @property
    def costs(self) -> list[ClientCost]:
        """Costs of the sending processes that have finished."""
        return [report.cost for report in self.newest.values() if report.cost is not None]


@dataclass(frozen=True)
class _Plan:
    """The task of one sending process."""

    config: BenchConfig
    bodies: list[bytes]
    """Bodies of all requests of the run, in all processes."""
    schedule: list[float]
    """Due time of each request, in seconds after the start."""
    warmups: list[bytes]
    """Bodies that this process sends for warm-up."""
    share: slice
    """Indices of this process's requests if concurrency is unlimited."""
    slots: int | None
    """Maximum requests in flight in this process; None for no limit."""


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the due times of `count` requests in seconds after the start, in order.

    The gaps are sampled from a gamma distribution of shape `burstiness` and mean 1 / `rate`: shape
    1 gives exponential gaps, a Poisson process; the coefficient of variation of the gaps is
    1 / sqrt(burstiness). They are scaled so that the last request is due at count / rate, which
    gives short runs the requested rate too. With an infinite rate all are due at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator = random.Random(seed)
    scale = 1.0 / (rate * burstiness)
    times = list(accumulate(generator.gammavariate(burstiness, scale) for _ in range(count)))
    stretch = count / rate / times[-1] if times[-1] > 0 else 1.0
    return [time * stretch for time in times]


def _client(target: TargetConfig, *, keep_alive: bool = True) -> HttpClient:
    url = target.address.rstrip("/").removesuffix("/v1")
    return HttpClient(url, target.headers(), keep_alive=keep_alive)


async def _plans(config: BenchConfig) -> tuple[str, list[_Plan]]:
    """Return the model's name, and the task of each sending process."""
    target, workload, traffic = config.target, config.workload, config.traffic
    client = _client(target)
    try:
        tokens = ServerTokens(client, target.model)
        model = await tokens.find_model()
        chat = target.backend == "openai-chat"
        prompts = await make_prompts(workload, tokens, as_text=chat)
    finally:
        client.close()
    bodies = request_bodies(workload, prompts, model, chat=chat)
    measured, warmups = bodies[: workload.num_prompts], bodies[workload.num_prompts :]
    schedule = arrival_times(len(measured), traffic.request_rate, traffic.burstiness, workload.seed)
    limit = traffic.max_concurrency
    count = min(traffic.processes, limit or traffic.processes)
    return model, [
        _Plan(
            config,
            measured,
            schedule,
            warmups=warmups[index::count],
            share=slice(index, None, count),
            slots=None if limit is None else limit // count + (index < limit % count),
        )
        for index in range(count)
    ]


# -- a sending process ---------------------------------------------------------------------------


class _Sender:
    """Sends this process's requests and collects reports."""

    def __init__(self, plan: _Plan, counter: "Synchronized[int]") -> None:
        self._plan = plan
        self._counter = counter
        self._start = 0.0
        self._client = _client(plan.config.target, keep_alive=plan.config.traffic.keep_alive)
        self._records: list[Record] = []
        self._running: dict[int, Record] = {}
        self._ended_tokens = 0
        self.deltas = 0

    async def warm_up(self) -> _WarmedUp:
        """Send the warm-up requests, which are not measured."""
        plan = self._plan
        slots = asyncio.Semaphore(plan.slots or len(plan.warmups) or 1)

        async def one(body: bytes) -> Record:
            async with slots:
                return await self._complete(body, Record())

        results = await asyncio.gather(*(one(body) for body in plan.warmups))
        self._client.close()
        errors = {result.error: result.detail for result in results if result.error is not None}
        return _WarmedUp(sum(result.error is None for result in results), errors)

    async def run(self, start: float) -> None:
        """Send all requests; ones that still run at the time limit are recorded as cut off."""
        plan, self._start = self._plan, start
        limit = asyncio.get_running_loop().time() + (start - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout_at(limit + plan.config.traffic.time_limit),
                asyncio.TaskGroup() as group,
            ):
                if plan.slots is None:
                    for index in range(*plan.share.indices(len(plan.bodies))):
                        await self._until_due(index)
                        group.create_task(self._send(index))
                else:
                    for _ in range(plan.slots):
                        group.create_task(self._send_next())
        self._client.close()

    async def _send_next(self) -> None:
        """Repeatedly send the next request that no other task or process has claimed."""
        while True:
            with self._counter.get_lock():
                index = self._counter.value
                self._counter.value = index + 1
            if index >= len(self._plan.bodies):
                return
            await self._until_due(index)
            await self._send(index)

    async def _until_due(self, index: int) -> None:
        # Event loop timers have a resolution of 1 ms; sleep(0) lets responses be read.
        await asyncio.sleep(max(0.0, self._start + self._plan.schedule[index] - time.monotonic()))

    async def _send(self, index: int) -> None:
        plan = self._plan
        record = self._running[index] = Record(
            index=index, scheduled=plan.schedule[index], started=time.monotonic() - self._start
        )
        try:
            await self._complete(plan.bodies[index], record)
        finally:
            del self._running[index]
            self._ended_tokens += max(record.output_tokens, record.deltas)
            self.deltas += record.deltas
            self._records.append(record)

    async def _complete(self, body: bytes, record: Record) -> Record:
        target, workload = self._plan.config.target, self._plan.config.workload
        return await complete(
            self._client,
            "/v1/chat/completions" if target.backend == "openai-chat" else "/v1/completions",
            body,
            stream=workload.stream,
            give_up_after=target.request_timeout,
            record=record,
        )

    def report(self) -> Report:
        """Return and clear what is new since the last report."""
        records, self._records = self._records, []
        running = sum(record.deltas for record in self._running.values())
        return Report(records, len(self._running), self._ended_tokens + running)


async def _note_lateness(samples: list[float]) -> None:
    """Record by how many seconds the event loop's timers are late."""
    while True:
        # Not the loop's clock, which is only updated between callbacks.
        due = time.monotonic() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        samples.append(max(0.0, time.monotonic() - due))


async def _measure(plan: _Plan, counter: "Synchronized[int]", pipe: Connection) -> None:
    async def send(message: _WarmedUp | Report) -> None:
        # The pipe is small: a thread keeps a slow reader from delaying responses.
        await asyncio.to_thread(pipe.send_bytes, msgspec.msgpack.encode(message))

    loop = asyncio.get_running_loop()
    sender = _Sender(plan, counter)
    await send(await sender.warm_up())
    start = await asyncio.to_thread(pipe.recv)
    if start is None:
        return
    sending = asyncio.create_task(sender.run(start))
    # Any message or the end of the pipe means to stop.
    loop.add_reader(pipe.fileno(), sending.cancel)
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    cpu, started_at = time.process_time(), time.monotonic()
    late: list[float] = []
    noting = asyncio.create_task(_note_lateness(late))
    while not sending.done():
        await asyncio.wait([sending], timeout=_REPORT_SECONDS)
        await send(sender.report())
    noting.cancel()
    loop.remove_reader(pipe.fileno())
    if not sending.cancelled():
        sending.result()
    late.sort()
    last = sender.report()  # requests that ended while the previous report was being sent
    last.cost = ClientCost(
        cpu_seconds=time.process_time() - cpu,
        wall_seconds=time.monotonic() - started_at,
        deltas=sender.deltas,
        loop_lag_p99=percentile(late or [0.0], 99),
        loop_lag_max=late[-1] if late else 0.0,
    )
    await send(last)


def _work(plan: _Plan, counter: "Synchronized[int]", pipe: Connection) -> None:
    """Main function of a sending process; its parent stops it through the pipe."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    freeze_heap()
    with contextlib.suppress(BrokenPipeError, EOFError), pipe:
        uvloop.run(_measure(plan, counter, pipe))


# -- the monitoring process ----------------------------------------------------------------------


class _Workers:
    """The sending processes and the pipes to them."""

    def __init__(self, plans: list[_Plan]) -> None:
        context = multiprocessing.get_context("spawn")
        # Referenced here because children cannot open it once its last owner is collected.
        self._counter = context.Value("q", 0)
        self.pipes: dict[Connection, int] = {}
        self._processes: list[BaseProcess] = []
        for index, plan in enumerate(plans):
            pipe, end = context.Pipe()
            process = context.Process(
                target=_work, args=(plan, self._counter, end), name=f"bench {index}", daemon=True
            )
            process.start()
            end.close()
            self.pipes[pipe] = index
            self._processes.append(process)

    def receive(self) -> Iterator[tuple[Connection, bytes]]:
        """Yield the messages that arrive within one refresh interval."""
        for pipe in multiprocessing.connection.wait(list(self.pipes), _REFRESH_SECONDS):
            assert isinstance(pipe, Connection)
            try:
                yield pipe, pipe.recv_bytes()
            except EOFError:
                raise BenchError(f"sending process {self.pipes[pipe]} died") from None

    def send(self, message: float | None) -> None:
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


def run(config: BenchConfig, watch: Callable[[Progress], None]) -> Progress:
    """Run the whole benchmark and return the measurements.

    A keyboard interrupt cuts off running requests; the result is then partial.

    Args:
        watch: called several times per second.

    Raises:
        BenchError: nothing could be measured.
        ValueError: the target address is invalid.
    """
    progress = Progress(planned=config.workload.num_prompts)
    watch(progress)
    progress.model, plans = asyncio.run(_plans(config))
    workers = _Workers(plans)
    try:
        _wait_for_warm_up(workers, progress, watch)
        cpu = time.process_time()
        progress.started_at = time.monotonic() + _START_SECONDS
        workers.send(progress.started_at)
        _collect(workers, progress, watch)
        progress.parent_cpu_seconds = time.process_time() - cpu
    finally:
        workers.close()
    progress.records.sort(key=lambda record: record.index)
    return progress


def _wait_for_warm_up(
    workers: _Workers, progress: Progress, watch: Callable[[Progress], None]
) -> None:
    waiting = len(workers.pipes)
    succeeded, errors = 0, dict[str, str]()
    while waiting:
        for _, message in workers.receive():
            warmed_up = msgspec.msgpack.decode(message, type=_WarmedUp)
            waiting -= 1
            succeeded += warmed_up.succeeded
            errors |= warmed_up.errors
        watch(progress)
    if errors and not succeeded:
        details = "; ".join(f"{kind} {detail}".strip() for kind, detail in errors.items())
        raise BenchError(f"every request of the warm-up failed: {details}")


def _collect(workers: _Workers, progress: Progress, watch: Callable[[Progress], None]) -> None:
    stop_sent = False
    with _noted_interrupt() as interrupted:
        while workers.pipes:
            if interrupted.is_set() and not stop_sent:
                workers.send(None)
                stop_sent = True
            for pipe, message in workers.receive():
                report = msgspec.msgpack.decode(message, type=Report)
                progress.records += report.records
                progress.newest[workers.pipes[pipe]] = report
                if report.cost is not None:
                    del workers.pipes[pipe]
                    pipe.close()
            watch(progress)


@contextlib.contextmanager
def _noted_interrupt() -> Iterator[threading.Event]:
    """Record the first interrupt instead of raising it: within a read it would split a message."""
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
