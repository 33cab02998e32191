"""An engine that is stopped while it starts leaves nothing behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.executor import worker_process
from engine.models.spec import UnsupportedModel
from engine.process.early_stop import RETRY_SECONDS, EarlyStop
from engine.process.main import build_executor
from engine.shared.config import EngineConfig, ParallelConfig
from engine.shared.lifeline import Lifeline
from tests.support.waiting import PATIENCE


def test_stop_interrupts_running_code() -> None:
    with pytest.raises(SystemExit):
        EarlyStop().request()


def test_stop_waits_for_deferred_sections() -> None:
    early_stop, passed = EarlyStop(), []

    def start() -> None:
        with early_stop.deferred():
            with early_stop.deferred():
                early_stop.request()
                passed.append("inner")
            passed.append("outer")
        passed.append("after")

    with pytest.raises(SystemExit):
        start()
    assert passed == ["inner", "outer"]


def test_deferred_section_without_stop_changes_nothing() -> None:
    early_stop = EarlyStop()
    with early_stop.deferred():
        pass
    with pytest.raises(KeyError), early_stop.deferred():
        raise KeyError


LOSES_THE_FIRST = """
import contextlib, sys, time
from engine.process import main
from engine.shared.config import ClusterConfig, EngineConfig
from engine.shared.lifeline import Lifeline

def works():
    while True:
        time.sleep(0.001)  # one long sleep goes on if a signal arrives just before it begins

def starts(*_):
    with contextlib.suppress(SystemExit):
        print("begun", flush=True)
        works()
    works()

main.wait_for_rank = starts
cluster = ClusterConfig(coordinator=f"ipc://{sys.argv[1]}/nobody")
sys.exit(main.run(EngineConfig(cluster=cluster), Lifeline(None)))
"""


def test_stop_swallowed_by_library_still_ends_engine(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOSES_THE_FIRST, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


ASKED_AGAIN_AS_IT_LEAVES = """
import signal, sys
from engine.process import main
from engine.shared.config import ClusterConfig, EngineConfig
from engine.shared.lifeline import Lifeline

class Late(main.EarlyStop):
    times_asked_again = 0

    def asked_again(self):
        self.times_asked_again += 1
        if self.times_asked_again == 1:
            self.request()

    def startup_over(self):
        self.asked_again()
        super().startup_over()

    def deferred(self):
        self.asked_again()
        return super().deferred()

main.EarlyStop = Late
main.wait_for_rank = lambda *_: signal.raise_signal(signal.SIGTERM)
stop = main.Receiver.stop
main.Receiver.stop = lambda self: (stop(self), print("stopped", flush=True))
cluster = ClusterConfig(coordinator=f"ipc://{sys.argv[1]}/nobody")
sys.exit(main.run(EngineConfig(cluster=cluster), Lifeline(None)))
"""


def test_stop_during_exit_allows_cleanup(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED_AGAIN_AS_IT_LEAVES, str(tmp_path)],
        stdout=subprocess.PIPE, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"stopped\n")


def test_stop_is_not_retried_after_startup() -> None:
    again: list[float] = []
    early_stop = EarlyStop(again.append)
    with pytest.raises(SystemExit):
        early_stop.request()
    early_stop.startup_over()
    early_stop.request()
    assert again == [RETRY_SECONDS, 0]


@contextmanager
def sigterm_asks(early_stop: EarlyStop) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: early_stop.request())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> "list[subprocess.Popen[bytes]]":
    """The processes that a team starts; SIGTERM arrives just after the first has been."""
    processes: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            processes.append(self)
            if len(processes) == 1:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(worker_process.subprocess, "Popen", Interrupted)  # type: ignore[attr-defined]
    return processes


def test_engine_stopped_while_workers_start_leaves_no_worker(
    started: "list[subprocess.Popen[bytes]]",
) -> None:
    config = EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=3))
    early_stop = EarlyStop()
    with sigterm_asks(early_stop), pytest.raises(SystemExit):
        build_executor(config, 0, Lifeline(None), early_stop)
    assert [each.poll() is not None for each in started] == [True, True]


def test_team_with_failed_second_worker_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    class OutOfMemory(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if processes:
                raise OSError(12, "Cannot allocate memory")
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(worker_process.subprocess, "Popen", OutOfMemory)  # type: ignore[attr-defined]
    config = EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=3))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        build_executor(config, 0, Lifeline(None), EarlyStop())
    assert processes[0].poll() is not None


def test_indivisible_heads_are_refused_before_workers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker_process.subprocess, "Popen", fail)  # type: ignore[attr-defined]
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=5))
    with pytest.raises(UnsupportedModel, match="--tensor-parallel-size 5 does not fit"):
        build_executor(config, 0, Lifeline(None), EarlyStop())
