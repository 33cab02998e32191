"""Failure reasons of workers, as reported by the engine."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.executor import team, worker_process
from engine.executor.team import MismatchedWorkers, Team, WorkerFailed
from engine.executor.team_messages import WorkerReply
from engine.shared.config import EngineConfig, ParallelConfig
from engine.shared.lifeline import pack_frame
from engine.shared.messages import ChildFailed
from tests.engine.executor.played import Played
from tests.support.waiting import PATIENCE


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    started: list[Played] = []

    def start(lifeline: int, commands: int) -> Any:
        started.append(Played(lifeline, commands))
        return started[-1]

    monkeypatch.setattr(worker_process, "spawn", start)
    return started


@pytest.fixture
def trio(workers: list[Played], monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    monkeypatch.setattr(team, "FAILURE_TIMEOUT", PATIENCE)
    made = Team(EngineConfig(parallel=ParallelConfig(tensor_parallel_size=3)), 0, 1)
    yield made
    for each in workers:
        each.close()
    made.close()


def test_death_is_reported_even_if_another_worker_fails_first(
    trio: Team, workers: list[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, read = threading.Event(), Team._read

    def read_and_tell(*arguments: Any) -> str:
        said = read(*arguments)
        if said:
            heard.set()
        return said

    monkeypatch.setattr(Team, "_read", read_and_tell)
    monkeypatch.setattr(team, "CAUSE_TIMEOUT", PATIENCE)
    workers[1].complain()
    assert heard.wait(PATIENCE)
    workers[0].close()
    assert str(trio.failure()) == "worker 1 has died"


def test_worker_error_is_the_reason_if_all_others_live(
    trio: Team, workers: list[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "CAUSE_TIMEOUT", 0.05)
    workers[1].complain()
    assert str(trio.failure()) == "worker 2: rank 1 lost the group"


@pytest.mark.parametrize(
    "data",
    [
        pack_frame(ChildFailed("not an answer")),
        b"\xff\xff\xff\xff",
        pack_frame(WorkerReply(0, device="cpu")).replace(b"cpu", b"cp\xff"),
    ],
    ids=["other", "endless", "no text"],
)
def test_malformed_worker_reply_ends_the_engine(
    data: bytes, trio: Team, workers: list[Played]
) -> None:
    workers[0].commands.sendall(data)
    assert str(trio.failure()).startswith("worker 1 cannot be understood: ")


def test_a_worker_on_another_kind_of_device_is_refused(trio: Team, workers: list[Played]) -> None:
    for worker, device in zip(workers, ("cpu", "cuda"), strict=True):
        worker.commands.sendall(pack_frame(WorkerReply(0, device=device)))
    with pytest.raises(MismatchedWorkers, match=r"a worker's device is cuda, but .* is cpu"):
        trio.wait_until_loaded("cpu")


def test_each_wait_for_replies_of_a_failed_team_ends(
    trio: Team, workers: list[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "CAUSE_TIMEOUT", 0.05)
    workers[1].complain()
    for _ in range(3):
        with pytest.raises(WorkerFailed, match="rank 1 lost the group"):
            trio.collect()
