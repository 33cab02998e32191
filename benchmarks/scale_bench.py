"""What many engines cost the coordinator and a front end, over real sockets.

    python -m benchmarks.scale_bench --engines 1000 --front-ends 16

One front end is real, from its link to the coordinator to its router. One process plays all
engines, each of which has its own sockets, registers, and reports its stats at a rate, and the
other front ends, which register, subscribe and throw away what comes. Then the coordinator is ended
and started again. Printed is processor time, which a busy machine does not change much, and bytes;
times of day mean little there.
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
from collections.abc import Callable, Iterator
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
from engine.shared.membership import Identity, Joined, Membership
from engine.shared.messages import (
    CoordinatorReply,
    EngineCounters,
    EngineSetup,
    EngineStats,
    FrontEndAddresses,
    FrontEnds,
    GroupOrder,
    Received,
    RouteHello,
    encode,
)
from engine.shared.transport import Transport, bound_address, make_context
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.router.engine_client import EngineClient
from server.router.link import ClusterLink
from server.router.router import build_router
from server.router.routing import POLICIES

HEARTBEAT = 1.0
SETUP = EngineSetup(8192, 16, 8192, "f" * 64, max_num_seqs=256, utilities=("info", "pause"))
_WARM_UP = 3.0
"""Seconds between the last join and the measurement."""


@dataclass
class _Engine:
    """One played engine: its sockets and what it says."""

    membership: Membership
    registration: "zmq.Socket[bytes]"
    rank: int
    incarnation: int
    orders: "zmq.Socket[bytes] | None" = None
    reports: "zmq.Socket[bytes] | None" = None
    version: int = 0
    counters: EngineCounters = field(default_factory=lambda: EngineCounters(spec_accepted_at=[0]))
    received: dict[int, Received] = field(default_factory=dict)
    requests: "zmq.Socket[bytes] | None" = None
    """To the front end that is real."""

    def stats(self, random: Random, tokens: int) -> EngineStats:
        """Return stats as of another step, in which some front end may have sent a request."""
        self.version += 1
        self.counters.count_step(tokens)
        self.counters.generation_tokens += tokens
        for index in self.received:
            each = self.received[index]
            sent = random.random() < 0.004  # 16 front ends at 30/s: two requests a second
            self.received[index] = Received(
                each.front_end, each.front_end_incarnation, each.requests + sent,
                each.prompt_tokens + 100 * sent, each.outputs + 1,
            )  # fmt: skip
        return EngineStats(
            rank=self.rank, incarnation=self.incarnation, version=self.version, wave=0,
            step=self.version, waiting=random.randrange(3), running=tokens, kv_usage=tokens / 16,
            queued_prefill_tokens=random.randrange(500), received=[*self.received.values()],
            counters=self.counters,
        )  # fmt: skip


class _Played:
    """All played engines and front ends, in one loop."""

    def __init__(self, address: str, engines: int, front_ends: int, rate: float) -> None:
        self._transport = _transport()
        self._replies = msgspec.msgpack.Decoder(CoordinatorReply)
        self._orders = msgspec.msgpack.Decoder(GroupOrder)
        self._random = Random(1)
        self._interval = 1 / rate
        self._engines = []
        for rank in range(engines):
            identity = Identity(
                kind="engine", index=rank, incarnation=secrets.randbits(48), pid=rank,
                host=f"node-{rank // 8}", group_config={"model": "m", "dtype": "bfloat16"},
                addresses=None,
            )  # fmt: skip
            self._engines.append(
                _Engine(*self._registered(address, identity), rank, identity.incarnation)
            )
        self._front_ends = []
        for index in range(1, front_ends):
            views = self._transport.connect(zmq.XSUB, f"{address}-front")
            views.send(b"\x01")
            membership, registration = self._registered(
                address, _front_end(index, FrontEndAddresses("", ""))
            )
            membership.ready(None)
            self._front_ends.append((membership, registration, views))
        self.sent = 0
        """Stats of all engines."""

    def _registered(
        self, address: str, identity: Identity
    ) -> tuple[Membership, "zmq.Socket[bytes]"]:
        name = f"{identity.kind}-{identity.incarnation:x}".replace("_", "-").encode()
        socket = self._transport.connect(zmq.DEALER, address, identity=name)
        return Membership(identity, HEARTBEAT), socket

    def run(self, connection: Connection) -> None:
        """Play until told to stop; answers how many stats were sent so far."""
        due = time.monotonic()
        while True:
            for engine in self._engines:
                self._serve(engine)
            for membership, registration, views in self._front_ends:
                for data in _received(registration):
                    membership.receive(self._replies.decode(data))
                for message in membership.tick(time.monotonic()):
                    registration.send(encode(message))
                for _ in _received(views):
                    pass
            if connection.poll():
                if connection.recv() == "stop":
                    return
                connection.send(self.sent)
            due = max(due + self._interval, time.monotonic() - 0.2)
            time.sleep(max(0.0, due - time.monotonic()))

    def _serve(self, engine: _Engine) -> None:
        for data in _received(engine.registration):
            event = engine.membership.receive(self._replies.decode(data))
            if isinstance(event, Joined) and not event.again:
                engine.orders = self._transport.connect(zmq.XSUB, event.welcome.publish_address)
                engine.orders.send(b"\x01")
                engine.reports = self._transport.connect(zmq.PUSH, event.welcome.output_address)
                engine.membership.ready(SETUP)
        if engine.orders is not None:
            for data in _received(engine.orders):
                order = self._orders.decode(data)
                if isinstance(order, FrontEnds):
                    self._follow(engine, order)
        for message in engine.membership.tick(time.monotonic()):
            engine.registration.send(encode(message))
            if engine.requests is not None:
                engine.requests.send(encode(RouteHello(engine.rank, engine.incarnation, 1)))
        if engine.reports is not None:
            engine.reports.send(encode(engine.stats(self._random, self._random.randrange(1, 16))))
            self.sent += 1

    def _follow(self, engine: _Engine, order: FrontEnds) -> None:
        known = engine.received
        engine.received = {
            each.index: known.get(each.index) or Received(each.index, each.incarnation, 0, 0)
            for each in order.front_ends
        }
        for each in order.front_ends:
            if engine.requests is None and each.addresses.requests:
                name = f"engine-{engine.incarnation:x}".encode()
                engine.requests = self._transport.connect(
                    zmq.DEALER, each.addresses.requests, identity=name
                )


def _transport() -> Transport:
    return Transport(ClusterConfig(heartbeat_interval=HEARTBEAT, engine_timeout=60), make_context())


def _received(socket: "zmq.Socket[bytes]") -> Iterator[bytes]:
    """Yield what has come."""
    with suppress(zmq.Again):
        while True:
            yield socket.recv(zmq.NOBLOCK)


def _front_end(index: int, addresses: FrontEndAddresses) -> Identity:
    return Identity(
        kind="front_end", index=index, incarnation=secrets.randbits(48), host=f"node-{index}",
        pid=os.getpid(), group_config={"model": "m"}, addresses=addresses,
    )  # fmt: skip


def _play(address: str, engines: int, front_ends: int, rate: float, connection: Connection) -> None:
    _Played(address, engines, front_ends, rate).run(connection)


@dataclass
class _Heard:
    """What the real front end has got so far."""

    engines: int = 0
    views: int = 0
    view_bytes: int = 0
    stats_age: float = 0.0


async def _listen_and_tell(address: str, directory: Path, connection: Connection) -> None:
    transport = _transport()
    requests = transport.bind(zmq.ROUTER, f"ipc://{directory}/requests")
    outputs = transport.bind(zmq.PULL, f"ipc://{directory}/outputs")
    addresses = FrontEndAddresses(bound_address(requests, ""), bound_address(outputs, ""))
    identity = _front_end(0, addresses)
    link = ClusterLink(identity, address, HEARTBEAT, transport)
    await link.join()
    client = EngineClient(
        front_end=0,
        router=build_router(
            front_end=0, incarnation=identity.incarnation, first_id=0, table=None, grace=60,
            policy=POLICIES["least-loaded"](0), max_resumes=1, resume_timeout=60,
            halted_timeout=60,
        ),
        metrics=FrontEndMetrics(FrontEndConfig(cluster=ClusterConfig(node="node-0"))),
        notify=link.notify,
        requests=requests,
        outputs=outputs,
    )  # fmt: skip
    link.subscribe(client.view_changed)
    heard = _Heard()
    _count(link, heard)
    link.ready()
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, connection.recv) != "stop":
        view = client.view
        heard.engines = 0 if view is None else sum(each.ready for each in view.engines)
        heard.stats_age = max(client.stats_age.values(), default=0.0)
        connection.send(heard)


def _count(link: ClusterLink, heard: _Heard) -> None:
    """Have what a link receives counted."""
    inbox: Any = link._views
    decode = inbox.decode

    def counted(frame: bytes) -> Any:
        heard.views += 1
        heard.view_bytes += len(frame)
        return decode(frame)

    inbox.decode = counted


def _listen(address: str, directory: Path, connection: Connection) -> None:
    asyncio.run(_listen_and_tell(address, directory, connection))


def _processor_time(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class _Parts:
    """The processes of one measurement."""

    def __init__(self, engines: int, front_ends: int, rate: float, directory: Path) -> None:
        self._address = f"ipc://{directory}/coordinator"
        self.coordinator = self._coordinator()
        self._front, self.front_end = self._start(_listen, self._address, directory)
        self._played, self._players = self._start(_play, self._address, engines, front_ends, rate)

    @staticmethod
    def _start(
        target: Callable[..., None], *arguments: object
    ) -> tuple[Connection, multiprocessing.process.BaseProcess]:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        return ours, process

    def _coordinator(self) -> "subprocess.Popen[bytes]":
        command = [
            str(Path(sys.executable).with_name("swell")), "coordinator",
            "--coordinator", self._address, "--heartbeat-interval", str(HEARTBEAT),
            "--engine-timeout", "60", "--log-level", "warning",
        ]  # fmt: skip
        return subprocess.Popen(command)

    def restart_coordinator(self) -> None:
        """End the coordinator and start another, which knows nobody."""
        self.coordinator.kill()
        self.coordinator.wait()
        self.coordinator = self._coordinator()

    def heard(self) -> _Heard:
        """Return what the real front end has got so far."""
        self._front.send("heard")
        heard: _Heard = self._front.recv()
        return heard

    def sent(self) -> int:
        """Return how many stats all engines have sent so far."""
        self._played.send("sent")
        number: int = self._played.recv()
        return number

    def wait_for(self, engines: int, within: float = 300.0) -> float:
        """Wait until the front end's view has all engines; return the seconds that took."""
        begun = time.monotonic()
        while self.heard().engines < engines:
            if time.monotonic() - begun > within:
                raise TimeoutError(f"{self.heard().engines} of {engines} engines after {within} s")
            time.sleep(0.1)
        return time.monotonic() - begun

    def stop(self) -> None:
        """End all processes."""
        for connection in (self._front, self._played):
            with suppress(OSError):
                connection.send("stop")
        self.coordinator.terminate()
        self.coordinator.wait(30)
        for process in (self.front_end, self._players):
            process.join(10)
            process.kill()


def measure(engines: int, front_ends: int, rate: float, seconds: float) -> dict[str, float]:
    """Return what one size costs."""
    with tempfile.TemporaryDirectory(prefix="swell-scale-") as directory:
        parts = _Parts(engines, front_ends, rate, Path(directory))
        try:
            joined = parts.wait_for(engines)
            time.sleep(_WARM_UP)
            pids = parts.coordinator.pid, parts.front_end.pid or 0
            heard, sent, begun = parts.heard(), parts.sent(), time.monotonic()
            before = [*map(_processor_time, pids)]
            time.sleep(seconds)
            after, span = parts.heard(), time.monotonic() - begun
            cores = [
                (_processor_time(pid) - used) / span for pid, used in zip(pids, before, strict=True)
            ]
            views = after.views - heard.views
            view_bytes = after.view_bytes - heard.view_bytes
            result = {
                "engines": engines,
                "front_ends": front_ends,
                "stats_per_engine_s": round((parts.sent() - sent) / engines / span, 1),
                "coordinator_cores": round(cores[0], 3),
                "front_end_cores": round(cores[1], 3),
                "views_per_s": round(views / span, 1),
                "kB_per_view": round(view_bytes / max(1, views) / 1e3, 1),
                "oldest_stats_s": round(after.stats_age, 2),
                "joined_s": round(joined, 1),
            }
            parts.restart_coordinator()
            time.sleep(2 * HEARTBEAT)
            result["joined_again_s"] = round(2 * HEARTBEAT + parts.wait_for(engines), 1)
            return result
        finally:
            parts.stop()


def main() -> None:
    """Measure each size and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--front-ends", type=int, default=16)
    parser.add_argument("--rate", type=float, default=30.0, help="stats of each engine a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for engines in args.engines:
        found = measure(engines, args.front_ends, args.rate, args.seconds)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
