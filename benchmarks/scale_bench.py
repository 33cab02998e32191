"""Measures the cost of many engines to the coordinator and a front end, over real sockets.

    python -m benchmarks.scale_bench --engines 1000 --front-ends 16

One process simulates all engines: each has its own sockets, registers, and reports stats at a given
rate. One front end is real, from its coordinator link to its router; the others register, subscribe
and discard what they receive. Then the coordinator is killed and restarted. Printed are CPU time,
which other load hardly affects, and bytes; elapsed times mean little on a busy machine.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import zmq

from engine.shared.config import ClusterConfig
from engine.shared.membership import Joined, Membership
from engine.shared.messages import (
    CoordinatorReply,
    EngineCounters,
    EngineSetup,
    EngineStats,
    FrontEndAddresses,
    FrontEnds,
    GroupOrder,
    Hello,
    Received,
    RouteHello,
    encode,
)
from engine.shared.transport import Transport, bound_address, make_context
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.router.engine_client import EngineClient
from server.router.link import ClusterLink
from server.router.router import Router
from server.router.routing import build_policy

HEARTBEAT = 1.0
SETUP = EngineSetup(8192, 16, 8192, "f" * 64, max_num_seqs=256, utilities=("info", "pause"))
_WARM_UP = 3.0
"""Seconds between the last join and the measurement."""
_ROUNDS, _IDLE_ROUNDS = 4, 60
"""An engine looks for messages in one of so many rounds, and reports in one of so many while idle:
at 30 rounds a second, every two seconds."""


@dataclass
class _Engine:
    """One simulated engine: its sockets and state."""

    membership: Membership
    registration: "zmq.Socket[bytes]"
    rank: int
    incarnation: int
    orders: "zmq.Socket[bytes] | None" = None
    reports: "zmq.Socket[bytes] | None" = None
    version: int = 0
    counters: EngineCounters = field(default_factory=lambda: EngineCounters(spec_accepted_at=[0]))
    received: list[Received] = field(default_factory=list)
    requests: "zmq.Socket[bytes] | None" = None
    """To the real front end."""

    def stats(self, random: Random, tokens: int) -> EngineStats:
        """Return stats after another step, in which a front end may have sent a request."""
        self.version += 1
        self.counters.count_step(tokens)
        self.counters.generation_tokens += tokens
        if self.received and random.random() < 1 / 15:  # at 30/s: two requests a second
            place = random.randrange(len(self.received))
            each = self.received[place]
            self.received[place] = Received(
                each.front_end, each.front_end_incarnation, each.requests + 1,
                each.prompt_tokens + 100, each.outputs + 50,
            )  # fmt: skip
        return EngineStats(
            rank=self.rank, incarnation=self.incarnation, version=self.version, wave=0,
            step=self.version, waiting=random.randrange(3), running=tokens, kv_usage=tokens / 16,
            queued_prefill_tokens=random.randrange(500), received=self.received,
            counters=self.counters,
        )  # fmt: skip


class _Fleet:
    """All simulated engines, in one loop."""

    def __init__(self, address: str, number: int, rate: float) -> None:
        self._transport = Transport(
            ClusterConfig(heartbeat_interval=HEARTBEAT, engine_timeout=60), make_context()
        )
        self._replies = msgspec.msgpack.Decoder(CoordinatorReply)
        self._orders = msgspec.msgpack.Decoder(GroupOrder)
        self._random = Random(1)
        self._interval = 1 / rate
        self._engines = [self._engine(address, rank) for rank in range(number)]
        self.sent = 0

    def _engine(self, address: str, rank: int) -> _Engine:
        incarnation = secrets.randbits(48)
        identity = Hello(
            kind="engine", index=rank, incarnation=incarnation, host=f"node-{rank // 8}",
            pid=rank, group_config={"model": "m", "dtype": "bfloat16"}, addresses=None,
        )  # fmt: skip
        membership = Membership(identity, HEARTBEAT)
        name = f"engine-{incarnation:x}".encode()
        socket = self._transport.connect(zmq.DEALER, address, identity=name)
        return _Engine(membership, socket, rank, incarnation)

    def run(self, connection: Connection) -> None:
        """Simulate until stopped; answers with the number of stats sent so far.

        Engines report like idle ones until "work".
        """
        due, works, rounds = time.monotonic(), False, 0
        while True:
            rounds += 1
            for engine in self._engines:
                if (engine.rank + rounds) % _ROUNDS == 0:
                    self._serve(engine)
                if works or (engine.rank + rounds) % _IDLE_ROUNDS == 0:
                    self._report(engine)
            if connection.poll():
                command = connection.recv()
                if command == "stop":
                    return
                works = works or command == "work"
                connection.send(self.sent)
            due = max(due + self._interval, time.monotonic() - 0.2)
            time.sleep(max(0.0, due - time.monotonic()))

    def _serve(self, engine: _Engine) -> None:
        with suppress(zmq.Again):
            while True:
                data = engine.registration.recv(zmq.NOBLOCK)
                event = engine.membership.receive(self._replies.decode(data))
                if isinstance(event, Joined) and not event.again:
                    self._joined(engine, event)
        if engine.orders is not None:
            with suppress(zmq.Again):
                while True:
                    order = self._orders.decode(engine.orders.recv(zmq.NOBLOCK))
                    if isinstance(order, FrontEnds):
                        self._follow(engine, order)
        for message in engine.membership.tick(time.monotonic()):
            engine.registration.send(encode(message))
            if engine.requests is not None:
                engine.requests.send(encode(RouteHello(engine.rank, engine.incarnation, 1)))

    def _report(self, engine: _Engine) -> None:
        if engine.reports is not None:
            engine.reports.send(encode(engine.stats(self._random, self._random.randrange(1, 16))))
            self.sent += 1

    def _joined(self, engine: _Engine, event: Joined) -> None:
        engine.orders = self._transport.connect(zmq.XSUB, event.welcome.publish_address)
        engine.orders.send(b"\x01")
        engine.reports = self._transport.connect(zmq.PUSH, event.welcome.output_address)
        engine.membership.ready(SETUP)

    def _follow(self, engine: _Engine, order: FrontEnds) -> None:
        known = {each.front_end: each for each in engine.received}
        engine.received = [
            known.get(each.index) or Received(each.index, each.incarnation, 0, 0)
            for each in order.front_ends
        ]
        for each in order.front_ends:
            if engine.requests is None and each.addresses.requests:
                name = f"engine-{engine.incarnation:x}".encode()
                engine.requests = self._transport.connect(
                    zmq.DEALER, each.addresses.requests, identity=name
                )


def _simulate(address: str, number: int, rate: float, connection: Connection) -> None:
    _Fleet(address, number, rate).run(connection)


def _identity(index: int, incarnation: int, addresses: FrontEndAddresses) -> Hello:
    return Hello(
        kind="front_end", index=index, incarnation=incarnation, host=f"node-{index}",
        pid=os.getpid(), group_config={"model": "m"}, addresses=addresses,
    )  # fmt: skip


async def _front_end(address: str, directory: Path, connection: Connection) -> None:
    transport = Transport(
        ClusterConfig(heartbeat_interval=HEARTBEAT, engine_timeout=60), make_context()
    )
    requests = transport.bind(zmq.ROUTER, f"ipc://{directory}/requests")
    outputs = transport.bind(zmq.PULL, f"ipc://{directory}/outputs")
    incarnation = secrets.randbits(48)
    addresses = FrontEndAddresses(bound_address(requests, ""), bound_address(outputs, ""))
    link = ClusterLink(_identity(0, incarnation, addresses), address, HEARTBEAT, transport)
    await link.join()
    received: dict[str, float] = {"views": 0, "view_bytes": 0}
    metrics = FrontEndMetrics(FrontEndConfig(cluster=ClusterConfig(node="node-0")))
    client = EngineClient(
        front_end=0,
        router=Router(
            front_end=0, incarnation=incarnation, first_id=0,
            policy=build_policy("least-loaded", 0), table=None, grace=60, max_resumes=1,
            resume_timeout=60, halted_timeout=60,
        ),
        metrics=metrics,
        notify=link.notify,
        requests=requests,
        outputs=outputs,
    )  # fmt: skip
    link.subscribe(client.view_changed)
    inbox: Any = link._views
    decode = inbox.decode

    def counted(frame: bytes) -> Any:
        received["views"] += 1
        received["view_bytes"] += len(frame)
        return decode(frame)

    inbox.decode = counted
    link.ready()
    loop = asyncio.get_running_loop()
    while True:
        command = await loop.run_in_executor(None, connection.recv)
        if command == "stop":
            return
        view = client.view
        engines = 0 if view is None else sum(each.ready for each in view.engines)
        received["engines"] = engines
        received["stats_age"] = max(client.stats_age.values(), default=0.0)
        if command == "metrics":
            for rank in range(engines):
                for series in metrics._sequences.of_engine(rank).histograms.values():
                    series.observe(1.0)
            begun = time.process_time()
            text = metrics.render(client)
            received["metrics_cpu_s"] = round(time.process_time() - begun, 2)
            received["metrics_MB"] = round(len(text) / 1e6, 2)
            received["metrics_series"] = sum(
                not line.startswith(b"#") for line in text.splitlines()
            )
        connection.send(received)


def _listen(address: str, directory: Path, connection: Connection) -> None:
    asyncio.run(_front_end(address, directory, connection))


def _others(address: str, front: str, number: int, connection: Connection) -> None:
    """Register front ends that discard what they receive."""
    transport = Transport(
        ClusterConfig(heartbeat_interval=HEARTBEAT, engine_timeout=60), make_context()
    )
    replies = msgspec.msgpack.Decoder(CoordinatorReply)
    peers = []
    for index in range(1, number):
        identity = _identity(index, secrets.randbits(48), FrontEndAddresses("", ""))
        name = f"front-end-{identity.incarnation:x}".encode()
        membership = Membership(identity, HEARTBEAT)
        views = transport.connect(zmq.XSUB, front)
        views.send(b"\x01")
        membership.ready(None)
        peers.append((membership, transport.connect(zmq.DEALER, address, identity=name), views))
    while not connection.poll(0.05):
        for membership, registration, views in peers:
            with suppress(zmq.Again):
                while True:
                    membership.receive(replies.decode(registration.recv(zmq.NOBLOCK)))
            for message in membership.tick(time.monotonic()):
                registration.send(encode(message))
            with suppress(zmq.Again):
                while True:
                    views.recv(zmq.NOBLOCK, copy=False)


def _processor_time(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class _Parts:
    """The processes of one measurement."""

    def __init__(self, engines: int, front_ends: int, rate: float, directory: Path) -> None:
        self._address = f"ipc://{directory}/coordinator"
        front = f"{self._address}-front"
        self._processes: list[multiprocessing.Process] = []
        self.coordinator = self._coordinator()
        spawn = multiprocessing.get_context("spawn")

        def start(target: Callable[..., None], *arguments: object) -> tuple[Connection, int]:
            local, remote = spawn.Pipe()
            process = spawn.Process(target=target, args=(*arguments, remote), daemon=True)
            process.start()
            self._processes.append(process)  # type: ignore[arg-type]
            assert process.pid is not None
            return local, process.pid

        self._front, self.front_pid = start(_listen, self._address, directory)
        self._rest, _ = start(_others, self._address, front, front_ends)
        self._fleet, self.fleet_pid = start(_simulate, self._address, engines, rate)

    def _coordinator(self) -> "subprocess.Popen[bytes]":
        command = [
            str(Path(sys.executable).with_name("swell")), "coordinator",
            "--coordinator", self._address, "--heartbeat-interval", str(HEARTBEAT),
            "--engine-timeout", "60", "--log-level", "warning",
        ]  # fmt: skip
        return subprocess.Popen(command)

    def restart_coordinator(self) -> None:
        """Kill the coordinator and start another, without any state."""
        self.coordinator.kill()
        self.coordinator.wait()
        self.coordinator = self._coordinator()

    def received(self, command: str = "heard") -> dict[str, float]:
        """Return the counts of the real front end."""
        self._front.send(command)
        received: dict[str, float] = self._front.recv()
        return received

    def sent(self, command: str = "sent") -> int:
        """Return the number of stats sent by all engines so far."""
        self._fleet.send(command)
        number: int = self._fleet.recv()
        return number

    def wait_for(self, engines: int, within: float = 300.0) -> float:
        """Wait until the front end's view has all engines; return the seconds it took."""
        begun = time.monotonic()
        while (joined := self.received()["engines"]) < engines:
            if time.monotonic() - begun > within:
                raise TimeoutError(f"{joined} of {engines} engines after {within} s")
            time.sleep(0.1)
        return time.monotonic() - begun

    def stop(self) -> None:
        """Stop all processes."""
        for connection in (self._front, self._rest, self._fleet):
            with suppress(OSError):
                connection.send("stop")
        self.coordinator.terminate()
        self.coordinator.wait(30)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def measure(engines: int, front_ends: int, rate: float, seconds: float) -> dict[str, object]:
    """Measure one cluster size."""
    with tempfile.TemporaryDirectory(prefix="swell-scale-") as directory:
        parts = _Parts(engines, front_ends, rate, Path(directory))
        try:
            joined = parts.wait_for(engines)
            parts.sent("work")
            time.sleep(_WARM_UP)
            received, sent, begun = parts.received(), parts.sent(), time.monotonic()
            measured = (parts.coordinator.pid, parts.front_pid, parts.fleet_pid)
            times = [*map(_processor_time, measured)]
            time.sleep(seconds)
            after, span = parts.received(), time.monotonic() - begun
            coordinator, front, fleet = (
                (_processor_time(pid) - before) / span
                for pid, before in zip(measured, times, strict=True)
            )
            views = after["views"] - received["views"]
            view_bytes = after["view_bytes"] - received["view_bytes"]
            result: dict[str, object] = {
                "engines": engines,
                "front_ends": front_ends,
                "stats_per_engine_s": round((parts.sent() - sent) / engines / span, 1),
                "coordinator_cores": round(coordinator, 3),
                "front_end_cores": round(front, 3),
                "simulating_cores": round(fleet, 3),
                "views_per_s": round(views / span, 1),
                "kB_per_view": round(view_bytes / max(1, views) / 1e3, 1),
                "oldest_stats_s": round(after["stats_age"], 2),
                "joined_s": round(joined, 1),
            }
            parts.restart_coordinator()
            time.sleep(2 * HEARTBEAT)
            result["joined_again_s"] = round(2 * HEARTBEAT + parts.wait_for(engines), 1)
            shown = parts.received("metrics").items()
            return result | {name: value for name, value in shown if name.startswith("metrics_")}
        finally:
            parts.stop()


def main() -> None:
    """Measure each size and print one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--front-ends", type=int, default=16)
    parser.add_argument("--rate", type=float, default=30.0, help="stats of each engine a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for engines in args.engines:
        found = measure(engines, args.front_ends, args.rate, args.seconds)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
