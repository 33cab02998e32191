"""Process slots that are kept filled with real processes, whatever fails around them."""

import asyncio
import io
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from engine.shared.messages import ControlQuery, RestartEngines, ScaleEngines
from server.fleet.child import Child, watch_children_without_threads
from server.fleet.keeper import Keeper, Role, StartupFailed
from server.fleet.scaling import EngineScaler
from tests.support.waiting import PATIENCE, until_async

pytestmark = pytest.mark.slow  # it starts processes

CHILD = """
import sys
from engine.shared.lifeline import Lifeline
lifeline = Lifeline.from_environment()
print("[/odd] words", flush=True)
lifeline.ready("it serves")
lifeline.watch()
sys.stdin.read()
import threading
threading.Event().wait()
"""


HANGS = """
import ctypes
import time
from engine.shared.lifeline import Lifeline
from engine.shared.logs import name_process
lifeline = Lifeline.from_environment()
name_process("hangs", "info")
lifeline.ready("it serves")
def holds_the_lock():
    ctypes.PyDLL(None).sleep(1000)  # no other thread of Python runs meanwhile
for _ in range(2):
    time.sleep(0.1)
    lifeline.heartbeat()
holds_the_lock()
"""

TURNS = """
import itertools
import time
from engine.shared.lifeline import Lifeline
lifeline = Lifeline.from_environment()
lifeline.ready("it serves")
for turn in itertools.count():
    lifeline.heartbeat()
    print(turn, flush=True)
    time.sleep(0.2)
"""


def pid_of(role: Role) -> int:
    """Return the process id in a slot."""
    assert isinstance(role.handle, Child)
    return role.handle.pid


@pytest.fixture
def role(tmp_path: Path) -> Role:
    """A slot whose process is ready at once and then sleeps."""
    (tmp_path / "sleeper.py").write_text(CHILD)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return Role(
        name="sleeper",
        module="sleeper",
        launch=lambda _: None,
        environment={"PYTHONPATH": path},
    )


def keeper(
    report_death: Callable[[Role], None] = lambda role: None,
    prepare: Callable[[], object] = lambda: None,
    hang_timeout: float = math.inf,
) -> Keeper:
    return Keeper(Console(file=io.StringIO()), "text", report_death, prepare, hang_timeout)


async def stop(kept: Keeper, role: Role) -> None:
    await kept.release(role)
    if role.handle is not None and role.handle.alive:
        role.handle.kill()
        await role.handle.wait()


async def test_temporarily_missing_interpreter_does_not_end_a_role(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeper()
    kept.keep(role)
    await kept.until_ready([role])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert role.handle is not None
    first = pid_of(role)
    role.handle.kill()
    await until_async(lambda: role.phase == "waiting to be started", "it waits")
    monkeypatch.undo()
    await until_async(role.ready.is_set, "it is ready")
    assert pid_of(role) != first
    await stop(kept, role)


async def test_time_until_ready_is_that_of_the_process(role: Role) -> None:
    kept = keeper()
    kept._started_at -= 1000
    kept.keep(role)
    await kept.until_ready([role])
    await stop(kept, role)
    assert isinstance(kept.console.file, io.StringIO)
    said = kept.console.file.getvalue()
    found = re.search(r"sleeper ready after ([\d.]+) s", said)
    assert found, said
    assert float(found[1]) < 1000


async def test_failed_spawn_at_first_start_is_reported_with_reason(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeper()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    kept.keep(role)
    with pytest.raises(StartupFailed, match=r"sleeper cannot be started.*No such file"):
        await kept.until_ready([role])
    await stop(kept, role)


@pytest.mark.parametrize(
    "failure",
    [
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
async def test_failed_fork_is_retried(role: Role, failure: Exception) -> None:
    failures = [failure, failure]

    def prepare() -> None:
        if kills and failures:
            raise failures.pop()

    kills: list[int] = []

    kept = keeper(prepare=prepare)
    kept.keep(role)
    await kept.until_ready([role])
    assert role.handle is not None
    kills.append(pid_of(role))
    role.handle.kill()
    await until_async(lambda: not role.ready.is_set(), "its death is seen")
    await until_async(role.ready.is_set, "it is ready")
    assert not failures
    await stop(kept, role)


def test_watching_children_needs_no_threads(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        kept = keeper()
        monkeypatch.setattr(threading.Thread, "start", no_memory)
        kept.keep(role)
        await kept.until_ready([role])
        await stop(kept, role)
        assert role.handle is not None
        assert not role.handle.alive

    watch_children_without_threads()
    asyncio.run(run())


async def test_error_while_handling_a_death_does_not_end_a_role(
    role: Role, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.fleet.keeper.MAX_SPAWN_BACKOFF", 0.1)

    def report_death(_: Role) -> None:
        raise ValueError("nobody expected this")

    kept = keeper(report_death)
    kept.keep(role)
    await kept.until_ready([role])
    assert role.handle is not None
    first = pid_of(role)
    role.handle.kill()
    await until_async(lambda: role.handle is not None and pid_of(role) != first, "another")
    await until_async(role.ready.is_set, "it is ready")
    await stop(kept, role)
    assert "nobody expected this" in caplog.text


async def test_unprintable_lines_do_not_stop_reading(
    role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sleeper.py").write_text(
        CHILD.replace("lifeline.watch()", "for _ in range(200): print('x' * 1000, flush=True)")
        .replace("sys.stdin.read()", "lifeline.progress('all is written')")
    )  # fmt: skip

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("server.fleet.keeper.relay_line", fail)

    kept = keeper()
    kept.keep(role)
    await until_async(lambda: role.phase == "all is written", "all is written")
    await stop(kept, role)
    assert "cannot be shown" in caplog.text


def scaler(kept: Keeper, engines: dict[int, Role], make: Callable[[int], Role]) -> EngineScaler:
    return EngineScaler(kept, engines, make, retire_within=5, start_within=PATIENCE)


async def test_an_unexpected_error_while_scaling_is_reported_and_scaling_continues(
    role: Role,
) -> None:
    made = [ValueError("a bug"), role]

    def make(_: int) -> Role:
        match made.pop(0):
            case Role() as place:
                return place
            case Exception() as error:
                raise error
            case _:
                raise AssertionError

    kept = keeper()
    scaling = scaler(kept, {}, make)
    task = asyncio.create_task(scaling.run())
    scaling.handle(ScaleEngines(1))
    await until_async(lambda: not scaling.handle(ControlQuery()).busy, "it is done")
    assert "a bug" in (scaling.handle(ControlQuery()).error or "")
    scaling.handle(ScaleEngines(1))
    await until_async(lambda: not scaling.handle(ControlQuery()).busy, "it is done")
    assert scaling.handle(ControlQuery()).error is None
    assert scaling.engines == {0: role}
    task.cancel()
    await stop(kept, role)


async def test_single_only_engine_is_not_scaled_up(role: Role) -> None:
    made: list[int] = []

    def make(rank: int) -> Role:
        made.append(rank)
        return role

    kept = keeper()
    scaling = EngineScaler(
        kept, {0: role}, make, retire_within=5, start_within=PATIENCE, is_single=True
    )
    status = scaling.handle(ScaleEngines(2))
    assert status.error == "an engine that spans nodes (--nnodes) cannot be scaled"
    assert (status.busy, status.engines) == (False, {"0": role.phase})
    kept.keep(role)
    await kept.until_ready([role])
    task = asyncio.create_task(scaling.run())
    scaling.handle(RestartEngines())
    await until_async(lambda: not scaling.handle(ControlQuery()).busy, "it is done")
    assert (made, scaling.handle(ControlQuery()).error) == ([0], None)
    task.cancel()
    await stop(kept, role)


async def test_replaced_engine_survives_one_failed_spawn(role: Role) -> None:
    failures: list[OSError] = []

    def prepare() -> None:
        if failures:
            raise failures.pop()

    def make(rank: int) -> Role:
        return Role(
            name=f"engine {rank}",
            module=role.module,
            launch=role.launch,
            environment=role.environment,
        )

    kept = keeper(prepare=prepare)
    engines = {rank: make(rank) for rank in range(2)}
    for engine in engines.values():
        kept.keep(engine)
    await kept.until_ready([*engines.values()])
    first = [pid_of(engine) for engine in engines.values()]
    scaling = EngineScaler(kept, engines, make, retire_within=PATIENCE, start_within=PATIENCE)
    task = asyncio.create_task(scaling.run())
    failures.append(BlockingIOError(11, "Resource temporarily unavailable"))
    scaling.handle(RestartEngines())
    await until_async(lambda: not scaling.handle(ControlQuery()).busy, "it is done")
    status = scaling.handle(ControlQuery())
    assert (status.error, status.engines) == (None, {"0": "ready", "1": "ready"})
    assert not failures
    assert not {pid_of(engine) for engine in scaling.engines.values()} & {*first}
    task.cancel()
    for engine in scaling.engines.values():
        await stop(kept, engine)


async def test_a_request_for_fewer_engines_ends_the_wait_for_one_that_is_not_ready(
    role: Role, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text(CHILD.replace('lifeline.ready("it serves")', ""))
    served = Role(name="served", module="", launch=lambda _: None)

    kept = keeper()
    scaling = scaler(kept, {0: served}, lambda _: role)
    task = asyncio.create_task(scaling.run())
    scaling.handle(ScaleEngines(2))
    await until_async(lambda: role.handle is not None, "it is started")
    scaling.handle(ScaleEngines(1))
    await until_async(lambda: not scaling.handle(ControlQuery()).busy, "the wait ends")
    status = scaling.handle(ControlQuery())
    assert (status.engines, status.error) == ({"0": "starting"}, None)
    assert role.handle is not None
    assert not role.handle.alive
    task.cancel()


async def test_hung_process_prints_stacks_and_is_replaced(role: Role, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(HANGS)
    replaced: list[dict[str, int]] = []
    role.launch = lambda _: replaced.append(dict(role.replaced))

    kept = keeper(hang_timeout=1.0)
    kept.keep(role)
    await kept.until_ready([role])
    hung = role.handle
    assert hung is not None
    first = pid_of(role)
    await until_async(lambda: pid_of(role) != first, "it is replaced")
    await stop(kept, role)
    assert replaced[:2] == [{}, {"hung": 1}]
    assert any("in holds_the_lock" in line for line in hung.last_lines)


async def test_process_stopped_by_signal_does_not_count_as_hung(role: Role, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(TURNS)

    kept = keeper(hang_timeout=2.0)
    kept.keep(role)
    await kept.until_ready([role])
    handle = role.handle
    assert handle is not None

    def turns() -> int:
        return int(handle.last_lines[-1]) if handle.last_lines else 0

    await until_async(lambda: role.last_heartbeat_at is not None and turns(), "it turns")
    first = pid_of(role)
    os.kill(first, signal.SIGSTOP)
    await asyncio.sleep(3.0)
    os.kill(first, signal.SIGCONT)
    before = turns()
    await until_async(lambda: turns() > before + 5 or not handle.alive, "it turns again")
    assert pid_of(role) == first
    assert handle.alive
    await stop(kept, role)
