"""Disaggregated prefill and decode, with engines that die in between."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from engine.shared.messages import AddRequest, KvSource, PoolingParams, RequestOutput, RequestTiming
from server.router.route import Route
from server.router.routing import LeastLoaded
from server.router.split import MAX_QUEUED, Split
from server.router.token_stream import RequestStream
from tests.server.router.fake_cluster import GREEDY, SETUP, Cluster, FakeEngine

MIN_TOKENS = 8
LONG = list(range(20))
DECODE = replace(SETUP, kv_role="decode")
ANSWER = [7, 8, 9]


def prefill_setup(rank: int) -> Any:
    return replace(SETUP, kv_role="prefill", kv_address=f"ipc://{rank}")


def cluster_of(roles: str) -> Cluster:
    """Return engines by letter: p prefills, d decodes, m does both."""
    cluster = Cluster(split=Split(MIN_TOKENS, LeastLoaded()))
    for rank, role in enumerate(roles):
        start(cluster, rank, role)
    return cluster


def start(cluster: Cluster, rank: int, role: str) -> FakeEngine:
    setups = {"p": prefill_setup(rank), "d": DECODE, "m": SETUP}
    return cluster.start(rank, setups[role])


def message_of(stream: RequestStream, engine: FakeEngine) -> AddRequest:
    return engine.held[stream.id]


def end_prefill(cluster: Cluster, stream: RequestStream, **output: Any) -> None:
    engine = cluster.runs(stream)
    assert engine is not None
    last = RequestOutput(stream.id, [99], "length", num_cached_tokens=4)
    timing = RequestTiming(0.1, 0.2)
    cluster.send_outputs(engine, replace(last, timing=timing, **output))


def answer(cluster: Cluster, stream: RequestStream) -> list[int]:
    """Send the rest of the answer from its engine; return the entire answer."""
    engine = cluster.runs(stream)
    assert engine is not None
    rest = ANSWER[len(message_of(stream, engine).output_token_ids) :]
    cluster.send_outputs(engine, RequestOutput(stream.id, rest, "stop", num_cached_tokens=19))
    return stream.request.output_token_ids


def test_long_prompt_goes_to_prefill_engine_then_to_answering_engine() -> None:
    cluster = cluster_of("pd")
    prefill, decode = cluster.engines.values()
    stream = cluster.submit("r", prompt=LONG)
    asked = message_of(stream, prefill)
    assert asked.offers_blocks
    assert (asked.sampling.max_tokens, asked.prompt_token_ids) == (1, LONG)
    assert not decode.held
    end_prefill(cluster, stream)
    assert not stream.unread.take()
    asked = message_of(stream, decode)
    assert asked.kv_source == KvSource("ipc://0", prefill.incarnation)
    assert (asked.sampling, asked.output_token_ids, asked.offers_blocks) == (GREEDY, [], False)
    assert answer(cluster, stream) == ANSWER
    [(_, shown)] = stream.unread.take()
    assert (shown.token_ids, shown.num_cached_tokens) == (ANSWER, 4)
    engine_periods = stream.times.engine_periods
    assert [each.engine for each in engine_periods] == [0]


def test_roles_are_checked_only_if_there_are_prefill_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = cluster_of("dd")
    with monkeypatch.context() as patch:
        patch.setattr(Route, "kv_role", property(lambda route: pytest.fail("looked at an engine")))
        cluster.submit("before", prompt=LONG)
    prefill = start(cluster, 2, "p")
    assert cluster.runs(cluster.submit("after", prompt=LONG)) is prefill


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": LONG[: MIN_TOKENS - 1]},
        {"prompt": LONG, "pooling": PoolingParams()},
        {"prompt": LONG, "exclusive_steps": 3},
        {"prompt": LONG, "sampling": replace(GREEDY, prompt_logprobs=1)},
    ],
    ids=["short", "pooling", "suspect", "scored prompt"],
)
def test_short_or_unsplittable_requests_go_to_answering_engine(
    options: dict[str, Any],
) -> None:
    cluster = cluster_of("pd")
    sampling = options.pop("sampling", GREEDY)
    message = AddRequest(0, "r", 0, 0, options.pop("prompt"), sampling, **options)
    stream = cluster.shell.submit(message)
    assert cluster.runs(stream) is cluster.engines[1]
    assert not message_of(stream, cluster.engines[1]).offers_blocks


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_prefill_engine_answers_single_token_requests(prompt_logprobs: int | None) -> None:
    cluster = cluster_of("pdd")
    one = replace(GREEDY, max_tokens=1, prompt_logprobs=prompt_logprobs)
    stream = cluster.shell.submit(AddRequest(0, "r", 0, 0, LONG, one))
    prefill = cluster.engines[0]
    assert message_of(stream, prefill).sampling == one
    assert not message_of(stream, prefill).offers_blocks
    cluster.send_outputs(prefill, RequestOutput(stream.id, [7], "length"))
    assert stream.request.output_token_ids == [7]
    assert not cluster.router.delivery.in_flight


def test_busy_prefill_engines_are_bypassed() -> None:
    cluster = cluster_of("pd")
    prefill, decode = cluster.engines.values()
    streams = [cluster.submit("r", prompt=LONG) for _ in range(8)]
    few = MAX_QUEUED * MIN_TOKENS // len(LONG) + 1
    assert [cluster.runs(each) for each in streams[: few + 1]] == [prefill] * few + [decode]
    longer = cluster.submit("r", prompt=LONG * 4)
    assert cluster.runs(longer) is prefill
    for stream in streams:
        if cluster.runs(stream) is prefill:
            end_prefill(cluster, stream)
        assert answer(cluster, stream) == ANSWER


def test_pinned_request_is_not_split() -> None:
    cluster = cluster_of("pd")
    stream = cluster.submit("r", prompt=LONG, pinned_rank=0)
    assert not message_of(stream, cluster.engines[0]).offers_blocks


def test_engines_of_one_role_do_everything() -> None:
    for roles in ("pp", "dd", "mm", "pm"):
        cluster = cluster_of(roles)
        streams = [cluster.submit("r", prompt=LONG) for _ in range(4)]
        for stream in streams:
            engine = cluster.runs(stream)
            assert engine is not None
            assert not message_of(stream, engine).offers_blocks
            assert roles != "pm" or engine.rank == 1
            assert answer(cluster, stream) == ANSWER


def test_engine_with_other_weights_prefills_only_for_itself() -> None:
    cluster = cluster_of("d")
    cluster.start(1, replace(prefill_setup(1), model_fingerprint="other"))
    stream = cluster.submit("r", prompt=LONG)
    assert cluster.runs(stream) is cluster.engines[0]


def test_prefill_moves_when_prefill_engine_dies() -> None:
    cluster = cluster_of("ppd")
    stream = cluster.submit("r", prompt=LONG)
    first = cluster.runs(stream)
    assert first is not None
    cluster.die(first)
    second = cluster.runs(stream)
    assert second is not None
    assert {first.rank, second.rank} == {0, 1}
    cluster.die(second)
    decode = cluster.engines[2]
    assert cluster.runs(stream) is decode
    assert message_of(stream, decode).kv_source is None
    assert answer(cluster, stream) == ANSWER


def test_offers_of_dead_engines_are_not_used() -> None:
    cluster = cluster_of("pd")
    stream = cluster.submit("r", prompt=LONG)
    prefill, decode = list(cluster.engines.values())
    decode.reachable = False
    end_prefill(cluster, stream)
    assert cluster.runs(stream) is not decode
    decode.reachable = True
    cluster.die(prefill)
    cluster.tick()
    assert message_of(stream, decode).kv_source is None
    assert answer(cluster, stream) == ANSWER


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_answering_engine_prefills_after_failed_prefill(reason: Any) -> None:
    cluster = cluster_of("pd")
    stream = cluster.submit("r", prompt=LONG)
    end_prefill(cluster, stream, finish_reason=reason)
    assert message_of(stream, cluster.engines[1]).kv_source is None
    assert answer(cluster, stream) == ANSWER


def test_moved_answer_uses_a_prefill_engine() -> None:
    cluster = cluster_of("pdd")
    stream = cluster.submit("r", prompt=LONG)
    end_prefill(cluster, stream)
    decode = cluster.runs(stream)
    assert decode is not None
    cluster.send_outputs(decode, RequestOutput(stream.id, ANSWER[:1]))
    cluster.die(decode)
    asked = message_of(stream, cluster.engines[0])
    assert (asked.output_token_ids, asked.sampling.max_tokens) == (ANSWER[:1], 2)
    end_prefill(cluster, stream)
    assert answer(cluster, stream) == ANSWER


def test_client_disconnecting_during_prefill_frees_the_engine() -> None:
    cluster = cluster_of("pd")
    stream = cluster.submit("r", prompt=LONG)
    stream.close()
    assert not cluster.engines[0].held
    assert not cluster.router.delivery.in_flight


def test_answers_are_complete_for_any_engine_death() -> None:
    for seed in range(200):
        engines_die_at_random(seed)


def engines_die_at_random(seed: int) -> None:
    """Send requests to engines of which some die; check their answers."""
    draw = random.Random(seed)
    cluster = cluster_of("ppdd")
    roles = dict(enumerate("ppdd"))
    streams = [cluster.submit(f"r{n}", prompt=LONG[: draw.choice([4, 20])]) for n in range(6)]
    deaths = 0
    for _ in range(200):
        waiting = [each for each in streams if not each.finished]
        if not waiting:
            break
        action = draw.random()
        if action < 0.1 and deaths < 2 and len(cluster.engines) > 1:
            deaths += 1
            cluster.die(draw.choice(list(cluster.engines.values())))
        elif action < 0.25:
            missing = [rank for rank in roles if rank not in cluster.engines]
            for rank in missing[:1]:
                start(cluster, rank, roles[rank])
        elif action < 0.3:
            cluster.tick()
        else:
            stream = draw.choice(waiting)
            engine = cluster.runs(stream)
            if engine is None:
                cluster.tick()
            elif message_of(stream, engine).offers_blocks:
                end_prefill(cluster, stream)
            else:
                message = message_of(stream, engine)
                told = len(stream.request.output_token_ids)
                last = told + 1 == len(ANSWER)
                output = RequestOutput(stream.id, ANSWER[told : told + 1], "stop" if last else None)
                flags = (
                    {"exclusive_request": stream.id}
                    if message.exclusive_steps
                    else {"exclusive_request": 0}
                )
                cluster.send_outputs(engine, output, **flags)
    for stream in streams:
        assert stream.finished, seed
        assert stream.request.output_token_ids == ANSWER, seed
    assert not cluster.router.delivery.in_flight, seed
    assert not any(engine.held for engine in cluster.engines.values()), seed
