"""Whose turn it is to run alone, and what the deaths of engines say of a request."""

import msgspec

from engine.shared.messages import AddRequest, EngineStats, SamplingParams
from server.router.probation import STEPS_ALONE, STEPS_GROWTH, Probation
from server.router.request import RoutedRequest, Suspicion
from tests.server.router.known_engines import stats

HERE = (0, 10)


def suspect(id_: int, *deaths: tuple[int, int]) -> RoutedRequest:
    request = RoutedRequest(AddRequest(id_, "r", 0, 0, [1], SamplingParams(max_tokens=9, seed=1)))
    for engine in deaths:
        request.suspicion.ended(engine, was_silent=False)
    return request


def says_alone(id_: int, version: int) -> EngineStats:
    return msgspec.structs.replace(stats(*HERE, version), alone=id_)


def test_a_request_is_suspect_after_more_deaths_than_are_allowed() -> None:
    probation = Probation(max_resumes=1, patience=9.0)
    assert not probation.is_suspect(suspect(1, (0, 1)))
    assert probation.is_suspect(suspect(1, (0, 1), (0, 2)))


def test_who_may_be_suspect_soon_waits_to_know_unless_it_is_on_trial() -> None:
    probation = Probation(max_resumes=1, patience=9.0)
    request = suspect(1, (0, 1))
    assert probation.may_run(request)
    request.suspicion.left((0, 2), was_silent=False)
    assert not probation.may_run(request)
    probation.on_trial = request
    assert probation.may_run(request)


def test_turns_go_round_and_who_is_in_doubt_is_passed_over() -> None:
    probation = Probation(max_resumes=0, patience=9.0)
    first, second, third = (suspect(id_, (0, id_)) for id_ in (1, 2, 3))
    for request in (first, second, third):
        probation.add(request, 0.0)
    first.suspicion.left((1, 1), was_silent=False)
    assert probation.next() is second
    assert probation.next() is None
    probation.broke_off(second)
    assert probation.next() is third


def test_a_trial_that_ends_well_clears_and_the_next_of_the_same_is_longer() -> None:
    probation = Probation(max_resumes=0, patience=9.0)
    request = suspect(1, (0, 1))
    probation.add(request, 0.0)
    probation.next()
    assert request.message.alone == STEPS_ALONE
    request.engine = HERE
    probation.watch(says_alone(1, 1))
    assert request.suspicion.alone_on == HERE
    probation.watch(says_alone(0, 2))
    assert not probation.suspects
    assert (request.message.alone, request.suspicion.died_on) == (0, frozenset())
    request.suspicion.ended((0, 2), was_silent=False)
    probation.add(request, 0.0)
    probation.next()
    assert request.message.alone == STEPS_ALONE * STEPS_GROWTH


def test_after_a_conviction_nobody_is_tried_before_the_next_tick_and_the_innocent_go() -> None:
    probation = Probation(max_resumes=0, patience=9.0)
    killer, innocent = suspect(1, (0, 1)), suspect(2, (0, 1))
    for request in (killer, innocent):
        probation.add(request, 0.0)
    probation.convicted(killer, [killer, innocent])
    assert probation.next() is None
    assert probation.tick() == [innocent]
    assert not probation.suspects


def test_silence_is_a_death_only_when_somebody_else_is_there() -> None:
    suspicion = Suspicion()
    suspicion.left(HERE, was_silent=True)
    assert suspicion.left_on(HERE)
    suspicion.replaced({0: 10})
    assert not suspicion.died_on
    suspicion.replaced({0: 11})
    assert suspicion.died_on == {HERE}


def test_an_engine_that_is_heard_again_has_not_died() -> None:
    suspicion = Suspicion()
    suspicion.left(HERE, was_silent=False)
    suspicion.alone_on = HERE
    suspicion.heard(HERE)
    assert not suspicion.in_doubt
    assert not suspicion.alone_on
