"""A router in its shell without sockets; the test simulates engines and coordinator."""

from dataclasses import dataclass, field
from typing import Any

from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    ClusterView,
    EngineDead,
    EngineEntry,
    EngineInput,
    EngineSetup,
    EngineStats,
    Received,
    RequestOutput,
    RouteHello,
    SamplingParams,
    StepOutputs,
)
from server.router.events import EngineHello, Tick
from server.router.generation_client import KillsEngines, NoEngineAvailable
from server.router.router import Router
from server.router.routing import LeastLoaded
from server.router.shell import RouterShell
from server.router.split import Split
from server.router.token_stream import RequestStream

GREEDY = SamplingParams(max_tokens=100, seed=1, temperature=0.0)
SETUP = EngineSetup(num_kv_blocks=9, block_size=16, max_model_len=64, model_fingerprint="f")
ME = 77


@dataclass
class FakeEngine:
    """An engine process as seen by the front end."""

    rank: int
    incarnation: int
    version: int = 0
    outputs: int = 0
    flags: dict[str, Any] = field(default_factory=dict)
    held: dict[int, AddRequest] = field(default_factory=dict)
    received: int = 0
    tokens: int = 0
    reachable: bool = True
    begun: set[int] = field(default_factory=set)
    setup: EngineSetup = SETUP

    @property
    def identity(self) -> bytes:
        return b"%d-%d" % (self.rank, self.incarnation)

    @property
    def alone(self) -> list[AddRequest]:
        """Requests that it must run exclusively and has not started."""
        return [r for r in self.held.values() if r.exclusive_steps and r.id not in self.begun]

    def stats(self) -> EngineStats:
        self.version += 1
        return EngineStats(
            rank=self.rank, incarnation=self.incarnation, version=self.version, wave=0, step=0,
            waiting=0, running=len(self.held), kv_usage=0.0, queued_prefill_tokens=0,
            received=[Received(0, ME, self.received, self.tokens, self.outputs)], **self.flags,
        )  # fmt: skip


class Cluster:
    """A front end's router with simulated engines."""

    def __init__(
        self,
        *ranks: int,
        max_resumes: int = 1,
        resume_timeout: float = 30.0,
        split: Split | None = None,
    ) -> None:
        self.now = 0.0
        self.router = Router(
            front_end=0, incarnation=ME, first_id=0, policy=LeastLoaded(), table=None, grace=5.0,
            max_resumes=max_resumes, halted_timeout=300.0, resume_timeout=resume_timeout,
            split=split,
        )  # fmt: skip
        self.shell = RouterShell(
            self.router, send=self._send, notify=lambda notice: None, on_idle=lambda: None,
            metrics=self, clock=lambda: self.now,
        )  # fmt: skip
        self.engines: dict[int, FakeEngine] = {}
        self._incarnations = 10
        self._version = 0
        for rank in ranks:
            self.start(rank)

    def count(self, name: str, *labels: str | int, by: float = 1) -> None: ...

    def observe(self, name: str, seconds: float) -> None: ...

    def _send(self, identity: bytes, message: EngineInput) -> bool:
        engine = next((e for e in self.engines.values() if e.identity == identity), None)
        if engine is None or not engine.reachable:
            return False
        if isinstance(message, AddRequest):
            engine.held[message.id] = message
            engine.received += 1
            engine.tokens += message.num_tokens
        elif isinstance(message, AbortRequests):
            for id_ in message.ids:
                engine.held.pop(id_, None)
        return True

    def start(self, rank: int, setup: EngineSetup = SETUP) -> FakeEngine:
        """Start a new engine process that joins and greets."""
        self._incarnations += 1
        engine = self.engines[rank] = FakeEngine(rank, self._incarnations, setup=setup)
        self.publish()
        self.hello(engine)
        return engine

    def hello(self, engine: FakeEngine) -> None:
        """Report from an engine that its request route is open."""
        self.shell.handle(
            EngineHello(engine.identity, RouteHello(engine.rank, engine.incarnation, 1))
        )

    def publish(self) -> None:
        """Publish the membership list from the coordinator."""
        self._version += 1
        entries = [
            EngineEntry(e.rank, e.incarnation, True, "h", 0, e.setup, e.stats())
            for e in self.engines.values()
        ]
        view = ClusterView(
            epoch=1, version=self._version, wave=0, running=True, engines=entries, num_front_ends=1
        )
        self.shell.handle(view)

    def send_outputs(self, engine: FakeEngine, *outputs: RequestOutput, **flags: Any) -> None:
        """Send outputs from an engine, with stats that include `flags` from now on."""
        engine.flags |= flags
        engine.begun.add(flags.get("exclusive_request", 0))
        engine.outputs += 1
        for output in outputs:
            if output.finish_reason is not None:
                engine.held.pop(output.id)
        self.shell.handle(StepOutputs(engine.stats(), list(outputs)))

    def die(self, engine: FakeEngine) -> None:
        """Send an engine's farewell message."""
        del self.engines[engine.rank]
        self.shell.handle(EngineDead(engine.rank, engine.incarnation, "boom"))

    def submit(self, name: str, **options: Any) -> RequestStream:
        pinned_rank = options.pop("pinned_rank", None)
        prompt = options.pop("prompt", [1, 2])
        message = AddRequest(0, name, 0, 0, prompt, GREEDY, **options)
        return self.shell.submit(message, pinned_rank)

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for engine in self.engines.values():
            self.hello(engine)
        self.shell.handle(Tick())

    def runs(self, stream: RequestStream) -> FakeEngine | None:
        """Return the engine that has a request, if any has."""
        found = [e for e in self.engines.values() if stream.request.id in e.held]
        assert len(found) < 2
        return found[0] if found else None


def error_of(stream: RequestStream) -> NoEngineAvailable | KillsEngines | None:
    """Return the error that a stream ended with, if any."""
    try:
        stream.unread.take()
    except (NoEngineAvailable, KillsEngines) as error:
        return error
    return None
