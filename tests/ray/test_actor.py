"""How long an actor lives: as long as its supervisor asks after it."""

import asyncio
from typing import Any

import msgspec
import pytest

from server.fleet.ray import actor as actor_module
from server.fleet.ray.actor import EngineActor
from server.fleet.ray.messages import Line
from tests.support.waiting import until_async

pytestmark = pytest.mark.ray


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of actors that have ended themselves; intervals are short."""
    found: list[int] = []

    def end(code: int) -> Any:
        found.append(code)
        raise asyncio.CancelledError

    monkeypatch.setattr("server.fleet.ray.actor.os._exit", end)
    monkeypatch.setattr(actor_module, "CHECK_INTERVAL", 0.001)
    monkeypatch.setattr(actor_module, "MAX_POLL_WAIT", 0.001)
    return found


def test_actor_without_polls_exits(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "POLL_TIMEOUT", 0.005)

    async def body() -> None:
        EngineActor()
        await until_async(lambda: ends, "it ends")

    asyncio.run(body())
    assert ends == [1]


def test_polled_actor_lives_and_answers_without_events(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "POLL_TIMEOUT", float("inf"))

    async def body() -> None:
        actor = EngineActor()
        for _ in range(3):
            actor._idle_seconds = 1e9
            assert msgspec.msgpack.decode(await actor.events()) == []
            assert actor._idle_seconds < 1e9
        actor._put(Line("one"))
        assert msgspec.msgpack.decode(await actor.events(), type=list[Line]) == [Line("one")]

    asyncio.run(body())
    assert ends == []
