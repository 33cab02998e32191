"""Engines halted by operators, and requests that only one engine can run."""

import pytest

from engine.shared.messages import RequestOutput
from server.router.generation_client import NoEngineAvailable
from tests.server.router.fake_cluster import Cluster, error_of


def test_a_halted_engine_gets_no_new_requests_while_another_can_run_them() -> None:
    cluster = Cluster(0, 1)
    cluster.send_outputs(cluster.engines[0], halted=True)
    streams = [cluster.submit(str(number)) for number in range(6)]
    assert {stream.request.rank for stream in streams} == {1}
    cluster.send_outputs(cluster.engines[0], halted=False)
    assert cluster.submit("after").request.rank == 0


def test_requests_wait_while_all_engines_are_halted_until_one_resumes() -> None:
    cluster = Cluster(0, 1, resume_timeout=3.0)
    for engine in cluster.engines.values():
        cluster.send_outputs(engine, halted=True)
    streams = [cluster.submit(str(number)) for number in range(3)]
    for _ in range(20):
        cluster.tick()
    assert all(error_of(stream) is None for stream in streams), "an operator may take his time"
    cluster.send_outputs(cluster.engines[1], halted=False)
    cluster.tick()
    assert {stream.request.rank for stream in streams} == {1}


def test_requests_on_halted_engine_wait_there() -> None:
    cluster = Cluster(0, 1)
    stream = cluster.submit("a")
    engine = cluster.runs(stream)
    assert engine is not None
    cluster.send_outputs(engine, halted=True)
    for _ in range(3):
        cluster.tick()
    assert cluster.runs(stream) is engine


def test_requests_on_halted_engine_move_on_operator_request_without_death() -> None:
    cluster = Cluster(0, 1)
    streams = [cluster.submit(str(number)) for number in range(4)]
    halted, other = cluster.engines[0], cluster.engines[1]
    [first, _] = [stream for stream in streams if stream.request.rank == 0]
    cluster.send_outputs(halted, RequestOutput(first.request.id, [7]), halted=True, hands_over=True)
    cluster.tick()
    assert {stream.request.rank for stream in streams} == {1}
    assert not halted.held
    assert other.held[first.request.id].output_token_ids == [7]
    assert not any(stream.request.suspicion.died_on for stream in streams)


def test_requests_stay_if_no_other_engine_is_available() -> None:
    cluster = Cluster(0, 1)
    streams = [cluster.submit(str(number)) for number in range(2)]
    for engine in cluster.engines.values():
        cluster.send_outputs(engine, halted=True, hands_over=True)
    cluster.tick()
    assert {stream.request.rank for stream in streams} == {0, 1}
    cluster.send_outputs(cluster.engines[0], halted=False, hands_over=False)
    cluster.tick()
    assert {stream.request.rank for stream in streams} == {0}


def test_pinned_request_waits_for_its_rank() -> None:
    cluster = Cluster(0, 1)
    stream = cluster.submit("a", pinned_rank=1)
    cluster.send_outputs(cluster.engines[1], RequestOutput(stream.request.id, [7]))
    cluster.die(cluster.engines[1])
    cluster.tick()
    assert cluster.runs(stream) is None
    engine = cluster.start(1)
    assert cluster.runs(stream) is engine
    assert engine.held[stream.request.id].output_token_ids == [7]


def test_a_pinned_request_whose_send_fails_waits_for_its_rank() -> None:
    cluster = Cluster(0, 1)
    cluster.engines[1].reachable = False
    stream = cluster.submit("a", pinned_rank=1)
    assert cluster.runs(stream) is None
    cluster.engines[1].reachable = True
    cluster.tick()
    assert cluster.runs(stream) is cluster.engines[1]


def test_pinned_request_to_absent_rank_fails_naming_it() -> None:
    cluster = Cluster(0, 1, resume_timeout=3.0)
    stream = cluster.submit("a", pinned_rank=1)
    cluster.die(cluster.engines[1])
    for _ in range(3):
        cluster.tick()
        assert cluster.runs(stream) is None
    cluster.tick()
    error = error_of(stream)
    assert isinstance(error, NoEngineAvailable)
    assert "engine 1" in str(error)
    assert not cluster.router.delivery.in_flight


@pytest.mark.parametrize("mode", ["halted", "handing over"])
def test_a_pinned_request_stays_with_its_halted_engine(mode: str) -> None:
    cluster = Cluster(0, 1)
    cluster.send_outputs(cluster.engines[1], halted=True, hands_over=mode == "handing over")
    stream = cluster.submit("a", pinned_rank=1)
    cluster.tick()
    assert cluster.runs(stream) is cluster.engines[1]
