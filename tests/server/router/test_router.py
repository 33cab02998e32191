"""The router's state machine without its shell: events in, actions out."""

import pytest

from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    EngineDead,
    RequestOutput,
    RouteHello,
    RouteTaken,
    SamplingParams,
    StepOutputs,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from server.router.events import (
    Action,
    CallResult,
    Count,
    Deliver,
    EngineHello,
    Event,
    Notify,
    Send,
    SendIfReachable,
    SendsFailed,
    Tick,
    Woken,
)
from server.router.generation_client import NoEngineAvailable, NoSuchEngine
from server.router.request import RoutedRequest
from server.router.router import Router
from server.router.routing import LeastLoaded
from tests.server.router.known_engines import entry, stats, view


def new_router() -> Router:
    return Router(
        front_end=0, incarnation=77, first_id=0, policy=LeastLoaded(), table=None, grace=5.0,
        max_resumes=1, halted_timeout=300.0, resume_timeout=5.0,
    )  # fmt: skip


def with_engines(*incarnations: int) -> Router:
    """Engines of ranks 0, 1 ... whose sockets are named after their incarnations."""
    router = new_router()
    entries = [entry(rank, incarnation) for rank, incarnation in enumerate(incarnations)]
    router.handle(view(1, *entries, running=True), 0.0)
    for rank, incarnation in enumerate(incarnations):
        router.handle(EngineHello(b"%d" % incarnation, RouteHello(rank, incarnation, 1)), 0.0)
    return router


def new_request(
    name: str = "r", pinned_rank: int | None = None, *, group: int = 0
) -> RoutedRequest:
    sampling = SamplingParams(max_tokens=9, seed=1)
    message = AddRequest(0, name, 0, 0, [1, 2], sampling, group=group)
    return RoutedRequest(message, pinned_rank)


def submitted(router: Router, *, now: float = 0.0) -> RoutedRequest:
    request = new_request()
    router.submit(request, now)
    return request


def call(router: Router, call_id: int, rank: int | None) -> list[Action]:
    return router.calls.begin(call_id, rank, "info", {}, router.members.routes.values())


def sends(actions: list[Action]) -> list[Send]:
    return [action for action in actions if isinstance(action, Send)]


def test_a_request_is_sent_and_its_tokens_are_delivered() -> None:
    router, request = with_engines(10), new_request()
    [send] = router.submit(request, 1.0)
    assert isinstance(send, Send)
    assert (send.to, send.message) == (b"10", request.message)
    output = RequestOutput(request.id, [5], "stop")
    message = StepOutputs(stats(0, 10, 1, running=1), [output])
    assert router.handle(message, 2.0) == [Deliver([(request, output)])]
    assert router.close(request, 3.0) == []


def test_waking_paused_engines_notifies_the_coordinator_and_is_timed() -> None:
    router = with_engines(10)
    router.handle(view(2, entry(0, 10), running=False), 0.0)
    actions = router.submit(new_request(), 1.0)
    assert actions[1:] == [Notify(WakeUp(0, 0, 0))]
    assert router.handle(StepOutputs(stats(0, 10, 1, running=1), []), 1.25) == [Woken(0.25)]
    assert router.handle(StepOutputs(stats(0, 10, 2, running=1), []), 1.5) == []
    assert len(router.submit(new_request(), 2.0)) == 1, "they run"


@pytest.mark.parametrize(
    ("pinned_rank", "error", "why"),
    [
        (None, NoEngineAvailable, "no engine can serve now"),
        (0, NoEngineAvailable, "engine 0 cannot serve now"),
        (5, NoSuchEngine, "there is no engine 5"),
    ],
)
def test_request_that_no_engine_can_serve_is_refused(
    pinned_rank: int | None, error: type[Exception], why: str
) -> None:
    router = with_engines(10)
    router.handle(EngineDead(0, 10, "boom"), 0.0)
    with pytest.raises(error) as refused:
        router.submit(new_request(pinned_rank=pinned_rank), 0.0)
    assert refused.type is error
    assert str(refused.value) == why
    assert not router.delivery.in_flight


@pytest.mark.parametrize("pinned_rank", [None, 0])
def test_later_sequences_wait_if_all_engines_die_at_start(
    pinned_rank: int | None,
) -> None:
    router = with_engines(10)
    first = new_request("r", pinned_rank)
    [send] = sends(router.submit(first, 0.0))
    router.handle(SendsFailed([send]), 0.0)
    router.handle(EngineDead(0, 10, "boom"), 0.0)
    later = new_request("r-1", pinned_rank, group=first.id)
    assert router.submit(later, 0.0) == []
    router.handle(view(2, entry(0, 11), running=True), 1.0)
    sent = sends(router.handle(EngineHello(b"11", RouteHello(0, 11, 1)), 1.0))
    assert [each.message for each in sent] == [first.message, later.message]


def test_closed_request_is_aborted_once() -> None:
    router = with_engines(10)
    request = submitted(router)
    assert router.close(request, 1.0) == [SendIfReachable(b"10", AbortRequests([request.id]))]
    assert router.close(request, 1.0) == []


def test_failed_send_goes_to_next_engine_without_suspicion() -> None:
    router = with_engines(10, 11)
    request = new_request()
    [first] = sends(router.submit(request, 0.0))
    [second] = sends(router.handle(SendsFailed([first]), 0.0))
    assert {first.rank, second.rank} == {0, 1}
    assert request.engine == (second.rank, second.incarnation)
    assert request.suspicion.left_on((first.rank, first.incarnation)) is False
    assert router.handle(SendsFailed([second]), 0.0) == []
    assert router.failover.waiting == {request: 0.0}


def test_failed_sends_suspect_only_requests_already_running_there() -> None:
    router = with_engines(10)
    before = submitted(router)
    router.handle(EngineDead(0, 9, "a predecessor's"), 0.0)
    failing = [sends(router.submit(new_request(str(i)), 0.0))[0] for i in range(3)]
    unsent = [router.delivery.in_flight[send.message.id] for send in failing]  # type: ignore[union-attr]
    actions = router.handle(SendsFailed(failing), 0.0)
    assert [type(action) for action in actions] == [SendIfReachable, Count]
    assert before.suspicion.in_doubt == {(0, 10)}
    assert not any(request.suspicion.in_doubt for request in unsent)
    assert set(router.failover.waiting) == {before, *unsent}


MOVED: dict[str, Event] = {
    "last words": EngineDead(0, 10, "boom"),
    "view": view(2, entry(1, 11), running=True),
    "another connection": EngineHello(b"new", RouteHello(0, 10, 2)),
}


@pytest.mark.parametrize("how", MOVED)
def test_every_loss_of_an_engine_moves_its_requests(how: str) -> None:
    router = with_engines(10, 11)
    requests = [submitted(router) for _ in range(4)]
    there = [request for request in requests if request.rank == 0]
    ids = [request.id for request in there]
    actions = router.handle(MOVED[how], 1.0)
    assert len(sends(actions)) == len(there) == 2
    assert all(request.engine is not None for request in requests)
    assert not {request.id for request in there} & set(ids)


def test_silence_moves_requests_on_the_detecting_tick() -> None:
    router = with_engines(10, 11)
    requests = [submitted(router) for _ in range(2)]
    moved: list[Action] = []
    for now in range(1, 7):
        router.handle(EngineHello(b"11", RouteHello(1, 11, 1)), float(now))
        moved += router.handle(Tick(), float(now))
    assert len(sends(moved)) == 1
    assert {request.rank for request in requests} == {1}


def test_successor_in_same_view_gets_requests_of_predecessor() -> None:
    router = with_engines(10)
    request = submitted(router)
    router.handle(EngineHello(b"20", RouteHello(0, 20, 1)), 1.0)
    [send] = sends(router.handle(view(2, entry(0, 20), running=True), 1.0))
    assert (send.to, request.engine) == (b"20", (0, 20))


def test_engine_is_confirmed_once_requests_can_be_routed_to_it() -> None:
    router = new_router()
    wants_reply = RouteHello(0, 10, 4, wants_reply=True)
    assert router.handle(EngineHello(b"x", wants_reply), 0.0) == []
    router.handle(view(1, entry(0, 10, ready=False)), 0.0)
    assert router.handle(EngineHello(b"x", wants_reply), 0.0) == []
    router.handle(view(2, entry(0, 10)), 0.0)
    assert router.handle(EngineHello(b"x", wants_reply), 0.0) == [
        SendIfReachable(b"x", RouteTaken(4))
    ]


def test_known_view_changes_nothing() -> None:
    router = with_engines(10)
    submitted(router)
    assert router.handle(view(1), 1.0) == []
    assert router.members.ready


def test_callers_of_an_engine_that_dies_are_answered_by_incarnation() -> None:
    router = with_engines(10, 11)
    [_, send] = sends(call(router, 1, None))
    assert send.message == UtilityCall(1, 0, "info", {})
    router.handle(UtilityResult(1, 0, {"rank": 0}), 0.0)
    for repeated_or_unknown in (UtilityResult(1, 0), UtilityResult(1, 7), UtilityResult(9, 1)):
        assert router.handle(repeated_or_unknown, 0.0) == []
    assert router.handle(EngineDead(1, 9, "a predecessor's"), 0.0) == []
    [answer] = router.handle(EngineDead(1, 11, "boom"), 0.0)
    assert isinstance(answer, CallResult)
    assert [result.error for result in answer.results] == [None, "engine 1 died before it answered"]
    assert answer.results[0].result == {"rank": 0}


def test_calls_end_on_engine_loss_failed_send_or_timeout() -> None:
    router = with_engines(10, 11, 12)
    calls = {rank: sends(call(router, rank, rank)) for rank in range(3)}
    by_view = router.handle(view(2, entry(1, 11), entry(2, 12), running=True), 0.0)
    by_send = router.handle(SendsFailed(calls[1]), 0.0)
    by_clock = router.calls.overdue(2, "within 1 s")
    answers = [a for a in (*by_view, *by_send, *by_clock) if isinstance(a, CallResult)]
    assert [answer.call_id for answer in answers] == [0, 1, 2]
    assert not any(router.calls.overdue(each, "within 2 s") for each in calls)
