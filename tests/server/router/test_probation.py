"""Which suspect runs alone next, and what engine deaths imply about a request."""

from engine.shared.messages import AddRequest, SamplingParams
from server.router.failover import Probation
from server.router.request import RoutedRequest, Suspicion

HERE = (0, 10)


def suspect(id_: int, *deaths: tuple[int, int]) -> RoutedRequest:
    request = RoutedRequest(AddRequest(id_, "r", 0, 0, [1], SamplingParams(max_tokens=9, seed=1)))
    for engine in deaths:
        request.suspicion.ended(engine, was_silent=False)
    return request


def test_possible_suspect_waits_for_certainty_unless_on_trial() -> None:
    probation = Probation(max_resumes=1, patience=9.0)
    request = suspect(1, (0, 1))
    assert probation.may_run(request)
    request.suspicion.left((0, 2), was_silent=False)
    assert not probation.may_run(request)
    probation.on_trial = request
    assert probation.may_run(request)


def test_trials_rotate_and_skip_requests_in_doubt() -> None:
    probation = Probation(max_resumes=0, patience=9.0)
    first, second, third = (suspect(id_, (0, id_)) for id_ in (1, 2, 3))
    for request in (first, second, third):
        probation.suspects[request] = 0.0
    first.suspicion.left((1, 1), was_silent=False)
    assert probation.next() is second
    assert probation.next() is None
    probation.abort_trial(second)
    assert probation.next() is third


def test_engine_heard_again_has_not_died() -> None:
    suspicion = Suspicion()
    suspicion.left(HERE, was_silent=False)
    suspicion.exclusive_on = HERE
    suspicion.engine_alive(HERE)
    assert not suspicion.in_doubt
    assert not suspicion.exclusive_on
