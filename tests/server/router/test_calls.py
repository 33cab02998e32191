"""Calls of engine utilities: every engine that was called is answered for, once."""

import pytest

from engine.shared.messages import UtilityCall, UtilityResult
from server.router.calls import UtilityCalls
from server.router.events import Action, Call, CallResult, Refuse, Send
from tests.server.router.known_engines import members_of

FRONT_END = 3


def begun(calls: UtilityCalls, call_id: int, rank: int | None, *incarnations: int) -> list[Action]:
    routes = members_of(*incarnations).routes.values()
    return calls.begin(Call(call_id, rank, "sleep", {"level": 1}), routes)


def test_a_call_of_all_goes_to_each_and_is_answered_once_all_have_by_rank() -> None:
    calls = UtilityCalls(FRONT_END)
    message = UtilityCall(1, FRONT_END, "sleep", {"level": 1})
    sends = [Send(b"10", 0, 10, message), Send(b"11", 1, 11, message)]
    assert begun(calls, 1, None, 10, 11) == sends
    assert calls.answered(UtilityResult(1, 1, {"a": 1})) == []
    results = [UtilityResult(1, 0, {"a": 0}), UtilityResult(1, 1, {"a": 1})]
    assert calls.answered(results[0]) == [CallResult(1, results)]
    assert not calls


def test_answers_to_nobody_and_repeated_ones_change_nothing() -> None:
    calls = UtilityCalls(FRONT_END)
    begun(calls, 1, None, 10, 11)
    assert calls.answered(UtilityResult(9, 0)) == []
    assert calls.answered(UtilityResult(1, 7)) == []
    assert calls.answered(UtilityResult(1, 0, {"first": True})) == []
    assert calls.answered(UtilityResult(1, 0, {"first": False})) == []
    [answer] = calls.answered(UtilityResult(1, 1))
    assert isinstance(answer, CallResult)
    assert answer.results[0].result == {"first": True}


@pytest.mark.parametrize(("rank", "why"), [(None, "no engine can"), (7, "engine 7 cannot")])
def test_a_call_of_nobody_is_refused(rank: int | None, why: str) -> None:
    calls = UtilityCalls(FRONT_END)
    [refused] = begun(calls, 1, rank, *((10,) if rank is not None else ()))
    assert isinstance(refused, Refuse)
    assert str(refused.error) == f"{why} be called now"
    assert not calls


def test_the_end_of_an_engine_answers_its_calls_and_not_those_of_its_successor() -> None:
    calls = UtilityCalls(FRONT_END)
    begun(calls, 1, 0, 10)
    begun(calls, 2, 0, 20)
    [answer] = calls.engine_lost((0, 10))
    assert isinstance(answer, CallResult)
    assert (answer.call_id, answer.results[0].error) == (1, "engine 0 died before it answered")
    assert calls.engine_lost((0, 10)) == []
    assert len(calls) == 1


def test_who_does_not_answer_in_time_is_answered_for_and_the_others_count() -> None:
    calls = UtilityCalls(FRONT_END)
    begun(calls, 1, None, 10, 11)
    calls.answered(UtilityResult(1, 1, {"a": 1}))
    [answer] = calls.overdue(1, "within 2 s")
    assert isinstance(answer, CallResult)
    assert answer.results[0].error == "engine 0 did not answer within 2 s; it may do it yet"
    assert answer.results[1].result == {"a": 1}
    assert calls.overdue(1, "within 2 s") == []
    assert calls.answered(UtilityResult(1, 0, {"late": True})) == []
