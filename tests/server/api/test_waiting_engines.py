"""Metrics of engines that the cluster has no capacity for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.shared.messages import ControlRequest, ControlStatus
from server.api import meta
from server.config import FrontEndConfig
from server.control import SupervisorTimeout


class FakeControl:
    """A supervisor that sends this answer, none, or one too late."""

    def __init__(self, status: ControlStatus | None, *, may_wait: bool = True) -> None:
        self.engines_may_wait = may_wait
        self._status = status

    async def call(self, _request: ControlRequest) -> ControlStatus:
        if self._status is None:
            raise SupervisorTimeout
        return self._status


class LateControl(FakeControl):
    async def call(self, _request: ControlRequest) -> ControlStatus:
        await asyncio.Event().wait()
        raise AssertionError


def exposed(control: FakeControl | None) -> str:
    services: Any = SimpleNamespace(config=FrontEndConfig(), names=("tiny",), control=control)
    return asyncio.run(meta.waiting_engines(services)).decode()


def status(**waiting: str) -> ControlStatus:
    return ControlStatus(3, {}, busy=False, waiting=waiting)


def test_waiting_engines_are_shown_with_missing_parts() -> None:
    text = exposed(FakeControl(status(**{"1": "GPU", "2": "CPU, GPU"})))
    first, second = text.splitlines()[2:]
    assert first.startswith('swell_engine_waiting_for_resources{engine="1",model_name="')
    assert first.endswith(',resources="GPU"} 1.0')
    assert second.endswith(',resources="CPU, GPU"} 1.0')


def test_nothing_is_shown_without_waiting_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meta, "WITHIN", 0.001)
    for control in (
        None,
        FakeControl(status()),
        FakeControl(status(**{"1": "GPU"}), may_wait=False),
        FakeControl(None),
        LateControl(None),
    ):
        assert exposed(control) == ""
