"""Engine utility calls: exactly one result per called engine."""

from engine.shared.messages import UtilityResult
from server.router.events import Action, CallResult
from server.router.router import UtilityCalls
from tests.server.router.known_engines import members_of

FRONT_END = 3


def begun(calls: UtilityCalls, call_id: int, rank: int | None, *incarnations: int) -> list[Action]:
    routes = members_of(*incarnations).routes.values()
    return calls.begin(call_id, rank, "sleep", {"level": 1}, routes)


def test_unknown_and_repeated_answers_change_nothing() -> None:
    calls = UtilityCalls(FRONT_END)
    begun(calls, 1, None, 10, 11)
    assert calls.answered(UtilityResult(9, 0)) == []
    assert calls.answered(UtilityResult(1, 7)) == []
    assert calls.answered(UtilityResult(1, 0, {"first": True})) == []
    assert calls.answered(UtilityResult(1, 0, {"first": False})) == []
    [answer] = calls.answered(UtilityResult(1, 1))
    assert isinstance(answer, CallResult)
    assert answer.results[0].result == {"first": True}
