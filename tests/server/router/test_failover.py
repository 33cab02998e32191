"""Failover actions for requests whose engines leave."""

from msgspec.structs import replace

from engine.shared.messages import AbortRequests, AddRequest, EncoderInput, SamplingParams
from server.router.delivery import Delivery
from server.router.events import Action, Count, Fail, Send, SendIfReachable
from server.router.failover import Failover
from server.router.generation_client import NoEngineAvailable
from server.router.members import EngineLost
from server.router.request import RoutedRequest
from server.router.routing import LeastLoaded
from tests.server.router import known_engines
from tests.server.router.known_engines import Known, entry, receive_hello, view

RESUME_TIMEOUT = 3.0


class Harness:
    """A failover among engines of ranks 0, 1 ... with these incarnations."""

    def __init__(self, *incarnations: int, max_resumes: int = 1) -> None:
        self.known = Known(*incarnations)
        self.members = self.known.members
        self.delivery = Delivery(
            front_end=0, first_id=0, members=self.members, loads=self.known.loads,
            policy=LeastLoaded(),
        )  # fmt: skip
        self.failover = Failover(
            members=self.members, loads=self.known.loads, delivery=self.delivery,
            max_resumes=max_resumes, halted_timeout=300.0, resume_timeout=RESUME_TIMEOUT,
        )  # fmt: skip

    def request(self, pinned_rank: int | None = None, now: float = 0.0) -> RoutedRequest:
        sampling = SamplingParams(max_tokens=9, seed=1)
        request = RoutedRequest(AddRequest(0, "r", 0, 0, [1, 2], sampling), pinned_rank)
        self.delivery.begin(request)
        self.failover.assign(request, now)
        return request

    def die(self, rank: int, incarnation: int, now: float = 0.0) -> list[Action]:
        [lost] = self.members.died(rank, incarnation)
        return self.failover.engine_lost(lost, now)

    def come(self, version: int, *engines: tuple[int, int]) -> None:
        for rank, incarnation in engines:
            receive_hello(self.members, rank, incarnation)
        self.members.take_view(view(version, *(entry(*engine) for engine in engines)), 0.0)


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions if type(action).__name__ != "Notify"]


def test_a_request_that_waits_too_long_fails() -> None:
    played = Harness(10)
    request = played.request()
    played.die(0, 10)
    assert played.failover.tick(RESUME_TIMEOUT) == []
    [fail] = played.failover.tick(RESUME_TIMEOUT + 0.1)
    assert isinstance(fail, Fail)
    assert fail.request is request
    assert isinstance(fail.error, NoEngineAvailable)
    assert not played.delivery.in_flight


def test_failed_send_keeps_original_waiting_time() -> None:
    played = Harness(10)
    request = played.request()
    played.die(0, 10, now=1.0)
    played.come(2, (0, 20))
    played.failover.assign_waiting(2.0)
    played.delivery.send_failed(request.message, (0, 20))
    played.failover.send_failed(request, 2.0)
    assert played.failover.waiting == {request: 1.0}


def test_unreachable_engine_gets_aborts_and_counts_as_possible_death() -> None:
    played = Harness(10, 11)
    request = played.request(pinned_rank=None)
    assert request.engine is not None
    engine, old = request.engine, request.id
    played.members.mark_unreachable(*engine)
    actions = played.failover.mark_unreachable(EngineLost(*engine), 0.0)
    assert actions[0] == SendIfReachable(b"%d" % engine[1], AbortRequests([old]))
    assert kinds(actions) == [SendIfReachable, Count, Send]
    assert request.suspicion.in_doubt == {engine}
    played.failover.engine_alive(engine)
    assert not request.suspicion.in_doubt


def test_lost_messages_are_resent_to_same_engine() -> None:
    played = Harness(10)
    request = played.request()
    old = request.id
    actions = played.failover.resend((0, 10), 1.0)
    assert actions[0] == SendIfReachable(b"10", AbortRequests([old]))
    assert kinds(actions) == [SendIfReachable, Send]
    assert request.engine == (0, 10)
    assert request.id != old
    assert played.known.requests() == [1], "the lost one counts no more"


def test_image_is_sent_once_and_again_after_lost_messages() -> None:
    played = Harness(10)
    setup = replace(known_engines.setup(), images=True, image_window=100)
    [route] = played.members.routes.values()
    route.entry = replace(route.entry, setup=setup)

    def crossing(actions: list[Action]) -> list[list[bytes]]:
        messages = [each.message for each in actions if isinstance(each, Send)]
        sent = [each for each in messages if isinstance(each, AddRequest)]
        return [[image.pixels for image in each.encoder_inputs] for each in sent]

    def send() -> list[Action]:
        image = EncoderInput(0, 1, b"digest", 1, 1, b"pixels")
        sampling = SamplingParams(max_tokens=9, seed=1)
        message = AddRequest(0, "r", 0, 0, [1, 2], sampling, encoder_inputs=[image])
        request = RoutedRequest(message)
        played.delivery.begin(request)
        return played.failover.assign(request, 0.0)

    first, second = send(), send()
    assert crossing(first) == [[b"pixels"]]
    assert crossing(second) == [[b""]]
    assert [each for each in second if isinstance(each, Count)] == [
        Count("mm_cache_queries", 1), Count("mm_cache_hits", 1),
    ]  # fmt: skip
    assert crossing(played.failover.resend((0, 10), 1.0)) == [[b"pixels"], [b""]]


def test_silence_followed_by_successor_counts_as_death() -> None:
    played = Harness(10, 11)
    request = played.request()
    assert request.engine is not None
    rank, incarnation = request.engine
    lost = EngineLost(rank, incarnation, was_silent=True)
    played.failover.engine_lost(lost, 0.0)
    assert request.suspicion.silent_on == {(rank, incarnation)}
    played.failover.replaced({rank: incarnation}, 0.0)
    assert not request.suspicion.died_on
    played.failover.replaced({rank: incarnation + 100}, 0.0)
    assert request.suspicion.died_on == {(rank, incarnation)}
