"""Requests in flight on engines that died: innocent ones do not fail."""

import pytest

from engine.shared.messages import RequestOutput
from server.router.failover import CONVICTING_DEATHS, EXCLUSIVE_STEPS, MAX_TRIES
from server.router.generation_client import KillsEngines
from server.router.token_stream import RequestStream
from tests.server.router.fake_cluster import Cluster, FakeEngine, error_of


def all_died_twice(cluster: Cluster, *names: str) -> list[RequestStream]:
    """Submit requests and let two engines die with all of them in flight."""
    streams = [cluster.submit(name) for name in names]
    for _ in range(2):
        for engine in [each for each in cluster.engines.values() if each.held]:
            cluster.die(engine)
        for rank in (0, 1):
            if rank not in cluster.engines:
                cluster.start(rank)
    assert all(error_of(stream) is None for stream in streams)
    return streams


def on_trial(cluster: Cluster) -> tuple[FakeEngine, int]:
    """Return the engine with a request to run alone, and the request's id."""
    [(engine, request)] = [(e, r) for e in cluster.engines.values() for r in e.alone]
    return engine, request.id


def dies_with(cluster: Cluster, stream: RequestStream) -> FakeEngine:
    """Let one engine after the other die while it runs a suspect alone; return the last."""
    for remaining in reversed(range(CONVICTING_DEATHS)):
        engine, id_ = on_trial(cluster)
        assert id_ == stream.request.id, "it is tried again before others"
        cluster.send_outputs(engine, exclusive_request=id_)
        cluster.die(engine)
        if remaining:
            assert error_of(stream) is None
            cluster.start(engine.rank)
    return engine


def stream_of(streams: list[RequestStream], id_: int) -> RequestStream:
    return next(stream for stream in streams if stream.request.id == id_)


def test_requests_move_immediately_after_first_death() -> None:
    cluster = Cluster(0)
    streams = [cluster.submit(name) for name in "abc"]
    cluster.die(cluster.engines[0])
    engine = cluster.start(0)
    assert [cluster.runs(stream) for stream in streams] == [engine] * 3
    assert not engine.alone


def test_a_request_that_survived_two_engines_runs_alone_instead_of_failing() -> None:
    cluster = Cluster(0)
    [stream] = all_died_twice(cluster, "a")
    engine, id_ = on_trial(cluster)
    assert engine.held[id_].exclusive_steps == EXCLUSIVE_STEPS
    cluster.send_outputs(engine, exclusive_request=id_)
    cluster.send_outputs(engine, RequestOutput(id_, [5]), exclusive_request=0)
    assert not stream.request.suspicion.died_on
    assert stream.request.message.exclusive_steps == 0
    cluster.die(engine)
    assert error_of(stream) is None or stream.request.output_token_ids == [5]
    assert cluster.runs(stream) is not None, "an ordinary request again"


def test_operator_killing_an_engine_convicts_no_exclusive_request() -> None:
    cluster = Cluster(0)
    [stream] = all_died_twice(cluster, "a")
    engine, id_ = on_trial(cluster)
    cluster.send_outputs(engine, exclusive_request=id_)
    cluster.die(engine)
    assert error_of(stream) is None
    cluster.start(0)
    engine, id_ = on_trial(cluster)
    assert id_ == stream.request.id
    cluster.send_outputs(engine, exclusive_request=id_)
    cluster.send_outputs(engine, RequestOutput(id_, [5]), exclusive_request=0)
    assert cluster.runs(stream) is engine
    assert not stream.request.message.exclusive_steps
    assert not stream.request.suspicion.exclusive_deaths, "it starts anew"


def test_suspects_are_tried_one_at_a_time() -> None:
    cluster = Cluster(0)
    streams = all_died_twice(cluster, "a", "b", "c")
    for _ in range(3):
        engine, id_ = on_trial(cluster)
        cluster.send_outputs(engine, exclusive_request=id_)
        cluster.send_outputs(engine, RequestOutput(id_, [5]), exclusive_request=0)
    assert not cluster.router.failover.probation.suspects
    assert all(cluster.runs(stream) is not None for stream in streams)
    assert all(not stream.request.message.exclusive_steps for stream in streams)


def test_only_exclusive_request_is_convicted_and_others_are_cleared() -> None:
    cluster = Cluster(0)
    streams = all_died_twice(cluster, "killer", "b", "c")
    engine, id_ = on_trial(cluster)
    killer = stream_of(streams, id_)
    innocent = cluster.submit("d")
    engine = dies_with(cluster, killer)
    error = error_of(killer)
    assert isinstance(error, KillsEngines)
    assert "alone" in str(error)
    cluster.start(engine.rank)
    cluster.tick()
    for stream in [*streams, innocent]:
        if stream is not killer:
            assert error_of(stream) is None
            assert cluster.runs(stream) is not None
            assert not stream.request.message.exclusive_steps, "the killer explains all deaths"
            assert not stream.request.suspicion.died_on


@pytest.mark.parametrize("how", ["view", "unreachable"])
def test_killer_is_convicted_for_any_detection_of_death(how: str) -> None:
    cluster = Cluster(0)
    [killer] = all_died_twice(cluster, "killer")
    engine, id_ = on_trial(cluster)
    cluster.send_outputs(engine, exclusive_request=id_)
    cluster.die(engine)
    cluster.start(engine.rank)
    engine, id_ = on_trial(cluster)
    cluster.send_outputs(engine, exclusive_request=id_)
    if how == "unreachable":
        engine.reachable = False
        bystander = cluster.submit("b")
        assert error_of(killer) is None, "it may be the connection only"
        assert cluster.runs(killer) is None or cluster.runs(killer) is engine
        assert bystander.request.rank != engine.rank or not engine.reachable
    del cluster.engines[engine.rank]
    cluster.publish()
    assert isinstance(error_of(killer), KillsEngines)


def test_engine_heard_again_has_not_died() -> None:
    cluster = Cluster(0)
    [stream] = all_died_twice(cluster, "a")
    engine, _ = on_trial(cluster)
    engine.reachable = False
    cluster.submit("b", pinned_rank=engine.rank)
    assert stream.request.suspicion.in_doubt
    engine.reachable = True
    cluster.hello(engine)
    assert not stream.request.suspicion.in_doubt


def test_deaths_before_trial_start_convict_only_after_max_tries() -> None:
    cluster = Cluster(0)
    [stream] = all_died_twice(cluster, "a")
    for tries in range(MAX_TRIES):
        assert error_of(stream) is None, tries
        engine, _ = on_trial(cluster)
        cluster.die(engine)
        for rank in (0, 1):
            if rank not in cluster.engines:
                cluster.start(rank)
    assert isinstance(error_of(stream), KillsEngines)
    assert not cluster.router.delivery.in_flight


def test_a_suspect_that_waits_for_its_trial_outlasts_the_resume_timeout() -> None:
    cluster = Cluster(0, resume_timeout=3.0)
    streams = all_died_twice(cluster, "a", "b")
    for _ in range(10):
        cluster.tick()
    assert all(error_of(stream) is None for stream in streams)
    for _ in range(30):
        cluster.tick()
    assert all(isinstance(error_of(stream), KillsEngines) for stream in streams)
    assert not any(engine.held for engine in cluster.engines.values())


def test_deaths_during_exclusive_request_of_other_front_end_do_not_count() -> None:
    cluster = Cluster(0)
    stream = cluster.submit("a")
    for _ in range(4):
        engine = cluster.engines[0]
        cluster.send_outputs(engine, exclusive_request=999)
        cluster.die(engine)
        cluster.start(0)
    engine = cluster.engines[0]
    assert cluster.runs(stream) is engine
    assert not engine.alone
    assert not stream.request.suspicion.died_on


def test_engine_silence_convicts_no_request() -> None:
    cluster = Cluster(0, 1)
    [stream] = all_died_twice(cluster, "a")
    engine, id_ = on_trial(cluster)
    cluster.send_outputs(engine, exclusive_request=id_)
    cluster.now += 4.0  # more than half the grace period, less than the time limit
    del cluster.engines[engine.rank]
    cluster.publish()
    assert error_of(stream) is None
    assert on_trial(cluster)[0] is not engine


def test_no_sibling_of_a_convicted_request_is_tried_before_its_client_gets_the_error() -> None:
    cluster = Cluster(0, 1)
    streams = [cluster.submit(name) for name in ("k-0", "k-1")]  # one on each engine
    for _ in range(2):
        for engine in [each for each in cluster.engines.values() if each.held]:
            cluster.die(engine)
        cluster.start(0)
        cluster.start(1)
    convicted = stream_of(streams, on_trial(cluster)[1])
    engine = dies_with(cluster, convicted)
    cluster.start(engine.rank)
    [sibling] = [each for each in streams if each is not convicted]
    assert isinstance(error_of(convicted), KillsEngines)
    assert cluster.runs(sibling) is None
    sibling.close()
    cluster.tick()
    assert not any(engine.held for engine in cluster.engines.values())


def test_a_request_that_is_suspected_again_runs_alone_for_longer() -> None:
    cluster = Cluster(0)
    [stream] = all_died_twice(cluster, "a")
    steps = []
    for _ in range(4):
        engine, id_ = on_trial(cluster)
        steps.append(engine.held[id_].exclusive_steps)
        cluster.send_outputs(engine, exclusive_request=id_)
        cluster.send_outputs(engine, exclusive_request=0)
        for _ in range(2):
            cluster.die(cluster.runs(stream))  # type: ignore[arg-type]
            for rank in (0, 1):
                if rank not in cluster.engines:
                    cluster.start(rank)
    assert steps == [
        EXCLUSIVE_STEPS,
        4 * EXCLUSIVE_STEPS,
        16 * EXCLUSIVE_STEPS,
        16 * EXCLUSIVE_STEPS,
    ]


def test_disconnected_suspect_makes_way_for_the_next() -> None:
    cluster = Cluster(0)
    streams = all_died_twice(cluster, "a", "b")
    engine, id_ = on_trial(cluster)
    stream_of(streams, id_).close()
    assert id_ not in engine.held
    cluster.tick()
    assert on_trial(cluster)[1] != id_
