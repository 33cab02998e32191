"""Protocol messages as plain tuples, and comparable snapshots of production objects."""

from itertools import count
from typing import Any

from coordinator.events import Event, FromMember
from coordinator.state import CoordinatorState
from engine.lockstep.wave import EngineWave
from engine.shared.messages import (
    EngineSetup,
    EngineStats,
    Goodbye,
    Hello,
    Ready,
    StartWave,
    WaveComplete,
)
from engine.shared.version import PROTOCOL_VERSION
from server.router.router import Router
from tests.protocol.explorer import freeze
from tests.protocol.situation import Call

_TAG_CYCLE = 4
"""Ranks are never more than one collective apart, so tags can wrap around quickly, or a little
later if each rank can have several steps in flight."""

_versions = count(1)


def tag_cycle(max_in_flight: int) -> int:
    return _TAG_CYCLE if max_in_flight == 1 else 4 * _TAG_CYCLE


def engine_view(engine: EngineWave) -> Any:
    engine._tag %= tag_cycle(engine._max_in_flight)
    return freeze({k: v for k, v in vars(engine).items() if k != "_repeat_at"})


def coordinator_view(state: CoordinatorState) -> Any:
    fields = {k: v for k, v in vars(state._wave).items() if k not in ("_order_at", "wakeups")}
    return (state._parameters.epoch, freeze(fields))


def front_view(front: Router) -> Any:
    view = front.members.view
    return None if view is None else (view.epoch, view.wave, view.running)


def hello(rank: int, wave: int = 0) -> Hello:
    return Hello(
        "engine", rank, rank + 1, "", 0, {"lockstep": "true"}, None, wave, protocol=PROTOCOL_VERSION
    )


def ready(rank: int) -> Ready:
    return Ready("engine", rank, rank + 1, EngineSetup(1, 1, 1, ""))


def replace_member(hub: CoordinatorState, rank: int) -> None:
    for message in (Goodbye("engine", rank, rank + 1), hello(rank), ready(rank)):
        hub.handle(FromMember(b"", message), 0.0)


def view_key(hub: CoordinatorState) -> tuple[Any, ...]:
    view = hub.view()
    return (view.epoch, view.wave, view.running)


def report_key(report: StartWave | WaveComplete) -> tuple[Any, ...]:
    kind = "start" if isinstance(report, StartWave) else "complete"
    return (kind, report.wave, report.hold_epoch, report.topology)


def report_event(rank: int, key: tuple[Any, ...]) -> Event:
    if key[0] == "start":
        return StartWave(rank, rank + 1, *key[1:])
    if key[0] == "complete":
        return WaveComplete(rank, rank + 1, *key[1:])
    _, wave, running, hold_epoch, topology = key
    return EngineStats(
        rank=rank, incarnation=rank + 1, version=next(_versions), wave=wave, step=0, waiting=0,
        running=0, kv_usage=0.0, queued_prefill_tokens=0, topology=topology,
        wave_running=running, hold_epoch=hold_epoch,
    )  # fmt: skip


def obey(engine: EngineWave, call: Call) -> None:
    match call.name:
        case "pause":
            engine.pause_requested(call.epoch)
        case "resume":
            engine.resume_requested(call.epoch)


def tick_until_due(engine: EngineWave) -> None:
    engine.tick(0.0)
    engine.tick(1.0)
