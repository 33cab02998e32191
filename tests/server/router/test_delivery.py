"""Requests on their way to engines, and their tokens on the way back."""

from collections.abc import Collection

import msgspec

from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    RequestOutput,
    RequestTiming,
    SamplingParams,
    StepOutputs,
)
from server.router.block_index import BlockIndex
from server.router.delivery import Delivery
from server.router.events import Count, Deliver, Send, SendIfReachable
from server.router.request import RoutedRequest
from server.router.route import Engine
from server.router.routing import LeastLoaded, PrefixAware
from tests.server.router.known_engines import Known, stats


class Harness:
    """A delivery among engines of ranks 0, 1 ... with these incarnations."""

    def __init__(self, *incarnations: int, index: BlockIndex | None = None) -> None:
        self.known = Known(*incarnations)
        self.delivery = Delivery(
            front_end=0,
            first_id=100,
            members=self.known.members,
            loads=self.known.loads,
            policy=LeastLoaded() if index is None else PrefixAware(),
            index=index,
        )

    def request(self, *, pinned_rank: int | None = None, **fields: object) -> RoutedRequest:
        message = AddRequest(0, "r", 0, 0, [1, 2], SamplingParams(max_tokens=9, seed=1))
        request = RoutedRequest(msgspec.structs.replace(message, **fields), pinned_rank)
        self.delivery.begin(request)
        return request

    def sent(self, request: RoutedRequest, now: float = 0.0) -> Send:
        [send, *_] = self.delivery.send(request, now)
        assert isinstance(send, Send)
        return send


def test_moved_request_keeps_tokens_tenant_and_root_with_new_id() -> None:
    played = Harness(10)
    request = played.request(tenant=77, cache_root=b"r" * 16)
    old = played.sent(request).message
    request.output_token_ids += [5, 6]
    played.delivery.renumber(request, 1.0)
    assert request.engine is None
    moved = played.sent(request, 1.0).message
    assert isinstance(moved, AddRequest)
    assert isinstance(old, AddRequest)
    assert moved.id != old.id
    assert (moved.output_token_ids, moved.tenant, moved.cache_root) == ([5, 6], 77, b"r" * 16)
    assert list(played.delivery.in_flight) == [moved.id]
    (load,) = played.known.all()
    assert load.prefill_tokens == old.num_tokens + moved.num_tokens == 2 + 4


def test_prompt_logprobs_are_requested_once() -> None:
    played = Harness(10)
    request = played.request(
        sampling=SamplingParams(max_tokens=9, seed=1, prompt_logprobs=2, logprobs=3)
    )
    request.output_token_ids += [5]
    message = played.sent(request).message
    assert isinstance(message, AddRequest)
    assert (message.sampling.prompt_logprobs, message.sampling.logprobs) == (None, 3)


def test_unsent_request_is_on_no_engine_and_not_counted() -> None:
    played = Harness(10)
    request = played.request(exclusive_steps=8)
    send = played.sent(request)
    assert isinstance(send.message, AddRequest)
    assert request.suspicion.tried_on == (0, 10)
    assert played.delivery.send_failed(send.message, (0, 10)) is request
    assert request.engine is None
    assert not request.suspicion.tried_on
    assert played.known.requests() == [0]


def test_outputs_are_delivered_to_requests_of_their_engine_only() -> None:
    played = Harness(10, 11)
    here, elsewhere = played.request(pinned_rank=0), played.request(pinned_rank=1)
    for request in (here, elsewhere):
        played.sent(request)
    outputs = [RequestOutput(here.id, [7]), RequestOutput(elsewhere.id, [8])]
    message = StepOutputs(stats(0, 10, 1), outputs)
    assert played.delivery.outputs(message, 0, 1.0) == [Deliver([(here, outputs[0])])]
    assert (here.output_token_ids, elsewhere.output_token_ids) == ([7], [])


def test_outputs_after_gap_and_duplicates_are_not_delivered() -> None:
    played = Harness(10)
    request = played.request()
    played.sent(request)
    message = StepOutputs(stats(0, 10, 1), [RequestOutput(request.id, [7])])
    assert played.delivery.outputs(message, 1, 1.0) == []
    assert played.delivery.outputs(message, -1, 1.0) == []
    assert request.output_token_ids == []


def test_moved_requests_are_aborted_on_engine_but_ended_ones_are_not() -> None:
    played = Harness(10)
    stale = [RequestOutput(1, [7]), RequestOutput(2, [7], "stop")]
    message = StepOutputs(stats(0, 10, 1), stale)
    assert played.delivery.outputs(message, 0, 1.0) == [SendIfReachable(b"10", AbortRequests([1]))]
    assert played.delivery.outputs(message, -1, 1.0) == []


class Knows(BlockIndex):
    """An index with contents given by the test."""

    cached: dict[int, int]

    def cached_tokens(
        self, engines: Collection[Engine], message: AddRequest, output_token_ids: list[int]
    ) -> dict[int, int]:
        return self.cached


def test_cached_tokens_decide_and_are_compared_once_with_engine_report() -> None:
    index = Knows(0, 100)
    index.cached = {1: 512}
    played = Harness(10, 11, index=index)
    request = played.request(prompt_token_ids=list(range(600)))
    send = played.sent(request)
    assert (send.rank, send.reason) == (1, "cached")
    timing = RequestTiming(1.0, 2.0)
    first = RequestOutput(request.id, [7], num_cached_tokens=496, timing=timing)
    outputs = played.delivery.outputs(StepOutputs(stats(1, 11, 1), [first]), 0, 1.0)
    expected = Count("routing_expected_cached_tokens", 512)
    found = Count("routing_found_cached_tokens", 496)
    assert outputs == [Deliver([(request, first)]), expected, found]
    last = RequestOutput(request.id, [8], "stop", timing=timing)
    outputs = played.delivery.outputs(StepOutputs(stats(1, 11, 2), [last]), 0, 1.0)
    assert outputs == [Deliver([(request, last)])]


def test_no_cache_prediction_for_pinned_requests() -> None:
    index = Knows(0, 100)
    index.cached = {0: 512}
    played = Harness(10, 11, index=index)
    request = played.request(pinned_rank=1)
    assert played.sent(request).reason == "pinned"
    first = RequestOutput(request.id, [7], timing=RequestTiming(1.0, 2.0))
    outputs = played.delivery.outputs(StepOutputs(stats(1, 11, 1), [first]), 0, 1.0)
    assert outputs == [Deliver([(request, first)])]


def test_nothing_is_aborted_on_unreachable_engines() -> None:
    played = Harness(10)
    request = played.request()
    played.sent(request)
    assert played.delivery.abort([request.id], None) == []
    assert played.delivery.abort([request.id], (0, 9)) == []
    played.known.members.mark_unreachable(0, 10)
    assert played.delivery.abort([request.id], (0, 10)) == []
    left = [SendIfReachable(b"10", AbortRequests([request.id]))]
    assert played.delivery.leave(request) == left, "it may hear again"
