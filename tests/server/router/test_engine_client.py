"""Requests to engines and outputs back over real sockets; the test simulates the engines."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.shared.config import ClusterConfig
from engine.shared.messages import (
    AbortRequests,
    AdapterOutcome,
    AdapterRequest,
    AdaptersView,
    AdapterTable,
    AddRequest,
    ClusterView,
    EncoderInput,
    EngineDead,
    EngineEntry,
    EngineInput,
    EngineStats,
    FrontEndNotice,
    RequestOutput,
    RequestTiming,
    RouteHello,
    SamplingParams,
    StepOutputs,
    UtilityCall,
    UtilityResult,
    UtilityValue,
    WakeUp,
    encode,
)
from engine.shared.transport import Transport
from server.router import engine_client
from server.router.engine_client import EngineClient
from server.router.generation_client import NoEngineAvailable
from server.router.router import Router
from server.router.routing import LeastLoaded
from server.router.token_stream import RequestStream
from tests.server.router.fake_cluster import GREEDY, SETUP
from tests.support.waiting import until_async

GUARD = 60.0


@dataclass
class Counts:
    """Records the client's metric reports."""

    routed: list[tuple[str | int, ...]] = field(default_factory=list)
    resumed: int = 0
    wakes: int = 0
    held: float = 0

    def count(self, name: str, *labels: str | int, by: float = 1) -> None:
        if name == "routing_decisions":
            self.routed.append(labels)
        self.resumed += name == "requests_resumed"
        self.held += by * (name == "held_request_seconds")

    def observe(self, name: str, seconds: float) -> None:
        assert seconds >= 0
        self.wakes += 1


class FakeEngine:
    """The engine's side of both sockets."""

    def __init__(self, world: "World", rank: int, incarnation: int, session: int) -> None:
        self.rank, self.incarnation = rank, incarnation
        self._version = 0
        identity = f"{rank}-{incarnation}".encode()
        transport = world.transport
        self.requests = transport.connect(zmq.DEALER, world.requests_address, identity=identity)
        self.outputs = transport.connect(zmq.PUSH, world.outputs_address)
        self.requests.send(encode(RouteHello(rank, incarnation, session)))

    async def receive(self) -> AddRequest | AbortRequests | UtilityCall:
        async with asyncio.timeout(GUARD):
            while not self.requests.poll(0):
                await asyncio.sleep(0)
        message = msgspec.msgpack.decode(self.requests.recv(), type=EngineInput)
        assert isinstance(message, AddRequest | AbortRequests | UtilityCall)
        return message

    def silent(self) -> bool:
        return not self.requests.poll(50)

    def send(self, *outputs: RequestOutput, running: int = 1, alone: int = 0) -> None:
        self._version += 1
        stats = EngineStats(
            rank=self.rank, incarnation=self.incarnation, version=self._version, wave=0, step=0,
            waiting=0, running=running, kv_usage=0.0, queued_prefill_tokens=0,
            exclusive_request=alone,
        )  # fmt: skip
        self.outputs.send(encode(StepOutputs(stats, list(outputs))))

    def answer(
        self, call_id: int, result: dict[str, UtilityValue] | None, error: str | None = None
    ) -> None:
        self.outputs.send(encode(UtilityResult(call_id, self.rank, result, error)))

    def die(self, reason: str | None = None) -> None:
        if reason is not None:
            self.outputs.send(encode(EngineDead(self.rank, self.incarnation, reason)))
        self.requests.close(linger=0)
        self.outputs.close(linger=500)


class World:
    """A client with its sockets, and the simulated engines of a test."""

    def __init__(
        self,
        directory: Path,
        context: "zmq.Context[zmq.Socket[bytes]]",
        min_ready_engines: int,
        cold_start_timeout: float,
    ) -> None:
        self.transport = Transport(ClusterConfig(), context)
        self.requests_address = f"ipc://{directory}/requests"
        self.outputs_address = f"ipc://{directory}/outputs"
        self.counts = Counts()
        self.notices: list[FrontEndNotice] = []
        self.engines: list[FakeEngine] = []
        self.setup = SETUP
        self._version = 0
        self.router = Router(
            front_end=0,
            incarnation=77,
            first_id=0,
            policy=LeastLoaded(),
            table=None,
            grace=5.0,
            max_resumes=1,
            resume_timeout=5.0,
            halted_timeout=300.0,
        )
        self.client = EngineClient(
            front_end=0,
            router=self.router,
            metrics=self.counts,
            notify=self.notices.append,
            requests=self.transport.bind(zmq.ROUTER, self.requests_address),
            outputs=self.transport.bind(zmq.PULL, self.outputs_address),
            min_ready_engines=min_ready_engines,
            cold_start_timeout=cold_start_timeout,
        )

    @property
    def num_open(self) -> int:
        return sum(route.is_open for route in self.router.members.routes.values())

    def engine(self, rank: int, incarnation: int, session: int = 1) -> FakeEngine:
        engine = FakeEngine(self, rank, incarnation, session)
        self.engines.append(engine)
        return engine

    def publish(self, *engines: FakeEngine, running: bool = False) -> None:
        self.publish_processes(
            *[(each.rank, each.incarnation) for each in engines], running=running
        )

    def publish_adapters(self, adapters: AdaptersView) -> None:
        self._version += 1
        self.client.view_changed(
            ClusterView(
                epoch=1, version=self._version, wave=3, running=False, engines=[],
                num_front_ends=1, adapters=adapters,
            )
        )  # fmt: skip

    def publish_processes(self, *engines: tuple[int, int], running: bool = False) -> None:
        self._version += 1
        entries = [EngineEntry(*engine, True, "h", 0, self.setup, None) for engine in engines]
        self.client.view_changed(
            ClusterView(
                epoch=1, version=self._version, wave=3, running=running, engines=entries,
                num_front_ends=1,
            )
        )  # fmt: skip

    def submit(
        self, name: str, prompt: list[int], sampling: SamplingParams, pinned_rank: int | None = None
    ) -> RequestStream:
        return self.client.submit(AddRequest(0, name, 0, 0, prompt, sampling), pinned_rank)

    async def one_engine(self) -> FakeEngine:
        engine = self.engine(0, 10)
        self.publish(engine)
        await until_async(lambda: self.client.ready, "an engine is ready")
        return engine

    async def two_engines(self) -> tuple[FakeEngine, FakeEngine]:
        first, second = self.engine(0, 10), self.engine(1, 11)
        self.publish(first, second)
        await until_async(lambda: self.num_open == 2, "both are open")
        return first, second


@asynccontextmanager
async def world(
    directory: Path, min_ready_engines: int = 1, cold_start_timeout: float = 0.0
) -> AsyncIterator[World]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = World(directory, context, min_ready_engines, cold_start_timeout)
    try:
        yield made
    finally:
        made.client.close()
        context.destroy(linger=0)


async def test_client_is_first_ready_with_enough_engines_and_later_with_one(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, min_ready_engines=2) as w:
        first, second = w.engine(0, 10), w.engine(1, 11)
        w.publish(first)
        await until_async(lambda: w.num_open == 1, "one is open")
        assert not w.client.ready
        w.client.check_accepts_requests()
        w.publish(first, second)
        await until_async(lambda: w.client.ready, "it is ready")
        w.publish(second)
        assert w.client.ready
        w.publish()
        assert not w.client.ready


async def test_first_requests_wait_until_all_serving_engines_are_reachable(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        waiting = asyncio.create_task(w.client.wait_for_engines())
        w.engine(0, 10)
        w.publish_processes((0, 10), (1, 11))
        await until_async(lambda: w.num_open == 1, "one is open")
        assert not waiting.done()
        w.engine(1, 11)
        async with asyncio.timeout(GUARD):
            await waiting
            assert w.num_open == 2
            w.publish()
            await w.client.wait_for_engines()  # later requests fail: there is no engine


@pytest.mark.parametrize("cause", ["no engine serves", "it drains"])
async def test_first_requests_do_not_wait_for_absent_engines(tmp_path: Path, cause: str) -> None:
    async with world(tmp_path) as w:
        waiting = asyncio.create_task(w.client.wait_for_engines())
        await asyncio.sleep(0)
        assert not waiting.done()
        if cause == "it drains":
            await w.client.drain(0.0)
        else:
            w.publish()
        async with asyncio.timeout(GUARD):
            await waiting


async def test_requests_are_held_if_engines_start_on_demand(tmp_path: Path) -> None:
    async with world(tmp_path, cold_start_timeout=GUARD) as w:
        w.publish()
        assert w.client.ready, "a load balancer has to send it requests"
        waiting = [asyncio.create_task(w.client.wait_for_engines()) for _ in range(2)]
        await until_async(lambda: w.counts.held >= 2, "both are held")
        engine = w.engine(0, 10)
        w.publish(engine)
        async with asyncio.timeout(GUARD):
            await asyncio.gather(*waiting)
            assert w.client.reaches_engines
            w.publish()
            assert not w.client.reaches_engines
            waiting = [asyncio.create_task(w.client.wait_for_engines())]
            before = w.counts.held
            await until_async(lambda: w.counts.held > before, "it is held again")
            await w.client.drain(0.0)
            await waiting[0]
            assert not w.client.ready


async def test_request_held_too_long_is_refused_and_later_ones_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_HELD", 1)
    async with world(tmp_path, cold_start_timeout=2.0) as w:
        w.publish()
        first = asyncio.create_task(w.client.wait_for_engines())
        await until_async(lambda: w.counts.held == 1, "it is held")
        await w.client.wait_for_engines()
        with pytest.raises(NoEngineAvailable):
            w.client.check_accepts_requests()
        with pytest.raises(NoEngineAvailable, match="No engine came within 2 s"):
            await first


async def test_requests_cut_by_shutdown_end_with_an_error(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        engines = await w.two_engines()
        streams = [w.submit(f"r{i}", [1, 2, 3], GREEDY) for i in range(2)]
        for stream in streams:
            assert isinstance(await engines[stream.request.rank].receive(), AddRequest)
        assert await w.client.drain(0.0) == 2
        for stream in streams:
            with pytest.raises(NoEngineAvailable, match="shutting down"):
                await stream.next()
            stream.close()
            assert isinstance(await engines[stream.request.rank].receive(), AbortRequests)
        assert not w.router.delivery.in_flight
        for ask in (w.client.check_accepts_requests, lambda: w.submit("r", [1], GREEDY)):
            with pytest.raises(NoEngineAvailable, match="shutting down"):
                ask()


async def test_requests_are_spread_over_engines_and_outputs_merged(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        engines = await w.two_engines()
        streams = [w.submit(f"r{i}", [1, 2, 3], GREEDY) for i in range(2)]
        assert {stream.request.rank for stream in streams} == {0, 1}
        for stream in streams:
            engine = engines[stream.request.rank]
            request = await engine.receive()
            assert isinstance(request, AddRequest)
            assert (request.prompt_token_ids, request.wave) == ([1, 2, 3], 3)
            engine.send(RequestOutput(request.id, [5], num_cached_tokens=2))
            engine.send(RequestOutput(request.id, [6, 7], "length"))
            await until_async(lambda s=stream: s.finished, "it ends")  # type: ignore[misc]
            output = await stream.next()
            assert (output.token_ids, output.finish_reason) == ([5, 6, 7], "length")
            assert output.num_cached_tokens == 2
        assert not w.router.delivery.in_flight


@pytest.mark.parametrize("how", ["last words", "view", "unreachable"])
async def test_request_moves_with_its_tokens_when_engine_dies(tmp_path: Path, how: str) -> None:
    async def provoke(w: World) -> None:
        # Sending to a disconnected peer fails as soon as the disconnect is detected.
        async with asyncio.timeout(GUARD):
            while w.counts.resumed == 0:
                w.submit("probe", [1], GREEDY)
                await asyncio.sleep(0.01)

    async with world(tmp_path) as w:
        engines = await w.two_engines()
        stream = w.submit("a", [1, 2], GREEDY)
        dying, other = engines[stream.request.rank], engines[1 - stream.request.rank]
        request = await dying.receive()
        assert isinstance(request, AddRequest)
        dying.send(RequestOutput(request.id, [7, 8], timing=RequestTiming(2.0, 1.0)))
        assert (await stream.next()).token_ids == [7, 8]
        if how == "last words":
            dying.die("boom")
        elif how == "view":
            w.publish(other)
        else:
            dying.die()
            await provoke(w)
        moved = await other.receive()
        while isinstance(moved, AddRequest) and moved.request_id != request.request_id:
            moved = await other.receive()
        assert isinstance(moved, AddRequest)
        assert moved.id != request.id
        assert (moved.prompt_token_ids, moved.output_token_ids) == ([1, 2], [7, 8])
        assert moved.sampling.seed == request.sampling.seed
        other.send(RequestOutput(moved.id, [9], "stop", timing=RequestTiming(4.0, 3.0, 0.5)))
        output = await stream.next()
        assert (output.token_ids, output.finish_reason) == ([9], "stop")
        # Probes sent before the disconnect was detected are moved as well.
        assert w.counts.resumed == 1 or how == "unreachable"
        took = stream.times.ended(time.monotonic())
        assert took is not None
        assert stream.times.engine == other.rank
        assert took.queue >= 6.0
        assert took.prefill == 4.0
        assert took.decode > 0.5


async def test_a_utility_call_gathers_the_answers_of_all_engines(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        engines = await w.two_engines()
        call = asyncio.create_task(w.client.call_utility(None, "sleep", {"level": 2}))
        for engine in reversed(engines):
            received = await engine.receive()
            assert isinstance(received, UtilityCall)
            assert (received.name, received.arguments) == ("sleep", {"level": 2})
            assert received.front_end == 0
            engine.answer(received.call_id + 50, {"is_sleeping": False})  # to nobody
            engine.answer(received.call_id, {"is_sleeping": True})
        results = await call
        assert [result.rank for result in results] == [0, 1]
        assert all(result.result == {"is_sleeping": True} for result in results)


async def test_utility_call_to_one_engine_is_not_rerouted(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        first, second = await w.two_engines()
        call = asyncio.create_task(w.client.call_utility(1, "info", {}))
        received = await second.receive()
        assert isinstance(received, UtilityCall)
        second.answer(received.call_id, None, "wrong arguments")
        [result] = await call
        assert (result.rank, result.error) == (1, "wrong arguments")
        assert first.silent()
        with pytest.raises(NoEngineAvailable, match="engine 7 cannot be called"):
            await w.client.call_utility(7, "info", {})


async def test_utility_call_without_answer_times_out(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        first, second = await w.two_engines()
        results = await w.client.call_utility(None, "info", {}, within=0.1)
        assert ["within 0.1 s" in (each.error or "") for each in results] == [True, True]
        await first.receive()
        call = asyncio.create_task(w.client.call_utility(None, "info", {}))
        received = await first.receive()
        assert isinstance(received, UtilityCall)
        second.die("the device is gone")
        first.answer(received.call_id, {"rank": 0})
        results = await call
        assert results[0].error is None
        assert "died" in (results[1].error or "")


async def test_utility_call_fails_before_an_engine_joins(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(NoEngineAvailable, match="no engine can be called"):
            await w.client.call_utility(None, "info", {})


async def test_a_request_is_repeated_until_the_coordinator_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.router.engine_client.TICK_INTERVAL", 0.01)
    async with world(tmp_path) as played:
        table = AdapterTable(3, [])
        played.publish_adapters(AdaptersView(table, []))
        changing = asyncio.create_task(played.client.change_adapter("sql", "/a/sql"))

        def operator_requests() -> list[AdapterRequest]:
            return [each for each in played.notices if isinstance(each, AdapterRequest)]

        await until_async(lambda: len(operator_requests()) > 2, "it is said again")
        [ticket] = {each.ticket for each in operator_requests()}
        others = AdapterOutcome(ticket + 1, 400)
        played.publish_adapters(AdaptersView(table, [others, AdapterOutcome(ticket, 200)]))
        assert (await changing).status == 200
        assert not played.client._operator_requests


async def test_malformed_messages_are_harmless(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        engine = await w.one_engine()
        stream = w.submit("a", [1], GREEDY)
        request = await engine.receive()
        for junk in (b"", b"\xff\xff", b"\x93\x01\x02\x03", encode(WakeUp(0, 0, 0))):
            engine.outputs.send(junk)
            engine.requests.send(junk)
        engine.send(RequestOutput(request.id, [5], "stop"))  # type: ignore[union-attr]
        assert (await stream.next()).token_ids == [5]
        assert w.client._outputs.dropped == 4


async def test_large_images_arrive_complete_and_again_on_next_engine(
    tmp_path: Path,
) -> None:
    pixels = bytes(range(256)) * (3 << 12)
    image = EncoderInput(
        position=1, num_tokens=2, digest=b"d" * 16, height=1 << 10, width=1 << 10, pixels=pixels
    )

    async with world(tmp_path) as w:
        w.setup = msgspec.structs.replace(SETUP, images=True)
        first, second = await w.two_engines()
        assert w.client.serves_images
        w.client.submit(AddRequest(0, "a", 0, 0, [1, 7, 7, 2], GREEDY, encoder_inputs=[image]))
        took, other = (first, second) if w.counts.routed[0][0] == 0 else (second, first)
        message = await took.receive()
        assert isinstance(message, AddRequest)
        assert message.encoder_inputs == [image]
        took.die("boom")
        again = await other.receive()
        assert isinstance(again, AddRequest)
        assert again.encoder_inputs == [image]
