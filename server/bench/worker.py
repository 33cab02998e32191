"""One sending process: takes its share of the requests, sends each when due, reports as it goes."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

import msgspec
import uvloop

from engine.shared.own_process import settle_heap
from server.bench.client import complete
from server.bench.config import BenchConfig, base_address, request_headers
from server.bench.connection import HttpClient
from server.bench.summary import ClientCost, Record, percentile

_REPORT_SECONDS = 0.25
_TICK_SECONDS = 0.02


@dataclass(frozen=True)
class WorkerPlan:
    """What one sending process has to do."""

    config: BenchConfig
    bodies: list[bytes]
    """Bodies of all requests of the run, whichever process sends them."""
    schedule: list[float]
    """Seconds after the start at which each is due."""
    warmups: list[bytes]
    """Bodies that this process sends before."""
    share: slice
    """Which requests this process sends if there is no limit of concurrency."""
    slots: int | None
    """How many requests it may have in flight; None for no limit."""

    def client(self) -> HttpClient:
        """Return connections to the server."""
        target = self.config.target
        keep_alive = self.config.traffic.keep_alive
        return HttpClient(base_address(target), request_headers(target), keep_alive=keep_alive)

    async def complete(self, client: HttpClient, body: bytes, record: Record) -> Record:
        """Send one request; return its record."""
        target = self.config.target
        return await complete(
            client,
            "/v1/chat/completions" if target.backend == "openai-chat" else "/v1/completions",
            body,
            stream=self.config.workload.stream,
            give_up_after=target.request_timeout,
            record=record,
        )


class Report(msgspec.Struct, tag=True):
    """What happened in one process since its last report."""

    records: list[Record]
    running: int
    tokens: int
    """Output tokens so far; those of running requests by their deltas."""


class WarmedUp(msgspec.Struct, tag=True):
    """The warm-up is over; the process waits for the start."""

    succeeded: int
    errors: dict[str, str]


class Finished(msgspec.Struct, tag=True):
    """All is sent and answered, or was cut off."""

    cost: ClientCost


WorkerMessage = Report | WarmedUp | Finished


class LoopLag:
    """Measures by how much the timers of the event loop are late."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        # Not the loop's own clock, which stands still while callbacks run.
        self._due = time.monotonic() + _TICK_SECONDS
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self.samples.append(max(0.0, time.monotonic() - self._due))
        self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Sender:
    """Sends this process's requests and keeps what is to be reported."""

    def __init__(self, plan: WorkerPlan, counter: "Synchronized[int]", start: float) -> None:
        self._plan = plan
        self._counter = counter
        self._start = start
        self._client = plan.client()
        self._records: list[Record] = []
        self._running: dict[int, Record] = {}
        self._ended_tokens = 0
        self.deltas = 0

    def report(self) -> Report:
        """Return what is new, and forget it."""
        records, self._records = self._records, []
        running = sum(record.deltas for record in self._running.values())
        return Report(records, len(self._running), self._ended_tokens + running)

    async def run(self) -> None:
        """Send all; requests that still run at the time limit are cut off and recorded as such."""
        plan = self._plan
        limit = asyncio.get_running_loop().time() + (self._start - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(limit + plan.config.traffic.time_limit):
                if plan.slots is None:
                    await self._send_when_due()
                else:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(plan.slots):
                            group.create_task(self._work())
        self._client.close()

    async def _send_when_due(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(*self._plan.share.indices(len(self._plan.bodies))):
                await self._until_due(index)
                group.create_task(self._send(index))

    async def _work(self) -> None:
        for index in self._claimed():
            await self._until_due(index)
            await self._send(index)

    def _claimed(self) -> Iterator[int]:
        """Yield requests that no other process sends, until there are no more."""
        while True:
            with self._counter.get_lock():
                index = self._counter.value
                self._counter.value = index + 1
            if index >= len(self._plan.bodies):
                return
            yield index

    async def _until_due(self, index: int) -> None:
        # The loop's timers count milliseconds; sleep(0) lets answers be read.
        await asyncio.sleep(max(0.0, self._start + self._plan.schedule[index] - time.monotonic()))

    async def _send(self, index: int) -> None:
        plan = self._plan
        record = self._running[index] = Record(
            index=index, scheduled=plan.schedule[index], started=time.monotonic() - self._start
        )
        try:
            await plan.complete(self._client, plan.bodies[index], record)
        finally:
            del self._running[index]
            self._ended_tokens += max(record.output_tokens, record.deltas)
            self.deltas += record.deltas
            self._records.append(record)


async def _warm_up(plan: WorkerPlan) -> WarmedUp:
    client = plan.client()
    slots = asyncio.Semaphore(plan.slots or len(plan.warmups) or 1)

    async def one(body: bytes) -> Record:
        async with slots:
            return await plan.complete(client, body, Record())

    results = await asyncio.gather(*(one(body) for body in plan.warmups))
    client.close()
    errors = {result.error: result.detail for result in results if result.error is not None}
    return WarmedUp(sum(result.error is None for result in results), errors)


async def _measure(plan: WorkerPlan, counter: "Synchronized[int]", pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    await _tell(pipe, await _warm_up(plan))
    start = await asyncio.to_thread(pipe.recv)
    if start is None:
        return
    sender = Sender(plan, counter, start)
    sending = asyncio.create_task(sender.run())
    # Anything that comes now, also the end of the pipe, means to stop.
    loop.add_reader(pipe.fileno(), sending.cancel)
    lag = LoopLag()
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    cpu, began = time.process_time(), time.monotonic()
    lag.start()
    while not sending.done():
        await asyncio.wait([sending], timeout=_REPORT_SECONDS)
        await _tell(pipe, sender.report())
    # Whatever ended while the last report was on its way.
    await _tell(pipe, sender.report())
    lag.stop()
    loop.remove_reader(pipe.fileno())
    if not sending.cancelled():
        sending.result()
    late = sorted(lag.samples) or [0.0]
    cost = ClientCost(
        cpu_seconds=time.process_time() - cpu,
        wall_seconds=time.monotonic() - began,
        deltas=sender.deltas,
        loop_lag_p99=percentile(late, 99),
        loop_lag_max=late[-1],
    )
    await _tell(pipe, Finished(cost))


async def _tell(pipe: Connection, message: WorkerMessage) -> None:
    # The pipe is small: in a thread, a reader that is slow for once delays no answer.
    await asyncio.to_thread(pipe.send_bytes, msgspec.msgpack.encode(message))


def main(plan: WorkerPlan, counter: "Synchronized[int]", pipe: Connection) -> None:
    """Body of a sending process; its parent ends it through the pipe."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    settle_heap()
    with contextlib.suppress(BrokenPipeError, EOFError), pipe:
        uvloop.run(_measure(plan, counter, pipe))
