"""Which front ends an engine greets, and when all of them route to it."""

from engine.process.links import ASK_INTERVAL, FrontEndLines
from engine.shared.messages import EngineGreeting, FrontEndAddresses, FrontEndEntry, RouteTaken

GRACE, INTERVAL = 5.0, 1.0
RANK, INCARNATION = 1, 77


def lines_to(*indices: int) -> FrontEndLines:
    lines = FrontEndLines(INCARNATION, "node", GRACE, INTERVAL)
    lines.update(RANK, 1, entries(*indices), 0.0)
    return lines


def entries(*indices: int) -> list[FrontEndEntry]:
    return [FrontEndEntry(i, 100 + i, FrontEndAddresses("requests", "outputs")) for i in indices]


def greeted(lines: FrontEndLines, now: float) -> dict[int, EngineGreeting]:
    return dict(lines.tick(RANK, now).greetings)


def test_an_engine_that_does_not_serve_yet_greets_and_asks_nothing() -> None:
    lines = lines_to(0, 1)
    assert greeted(lines, 0.0) == {
        0: EngineGreeting(RANK, INCARNATION, 1),
        1: EngineGreeting(RANK, INCARNATION, 2),
    }
    assert not greeted(lines, INTERVAL / 2)
    assert lines.wait == INTERVAL
    assert lines.take_strangers(GRACE * 2) is None


def test_front_ends_are_asked_often_until_each_has_answered() -> None:
    lines = lines_to(0, 1)
    lines.serve(10.0)
    assert all(greeting.asks for greeting in greeted(lines, 10.0).values())
    assert lines.wait == ASK_INTERVAL
    lines.answered(RouteTaken(session=1))
    assert lines.take_strangers(10.01) is None
    assert all(greeting.asks for greeting in greeted(lines, 10.0 + ASK_INTERVAL).values())
    lines.answered(RouteTaken(session=2))
    assert lines.take_strangers(10.03) == []
    assert lines.take_strangers(10.04) is None, "it is said once"
    assert lines.wait == INTERVAL
    assert not any(greeting.asks for greeting in greeted(lines, 12.0).values())


def test_an_engine_without_front_ends_waits_for_none() -> None:
    lines = lines_to()
    lines.serve(10.0)
    assert lines.take_strangers(10.0) == []


def test_front_ends_that_do_not_answer_are_named_after_the_grace() -> None:
    lines = lines_to(0, 3)
    lines.serve(10.0)
    lines.answered(RouteTaken(session=1))
    assert lines.take_strangers(10.0 + GRACE - 0.01) is None
    assert lines.take_strangers(10.0 + GRACE) == [3]


def test_a_front_end_that_left_is_not_waited_for_but_its_successor_is() -> None:
    lines = lines_to(0, 1)
    lines.serve(10.0)
    lines.answered(RouteTaken(session=1))
    lines.update(RANK, 1, entries(0), 10.01)
    assert lines.take_strangers(10.01) == []
    lines.serve(20.0)
    successor = FrontEndEntry(0, 200, FrontEndAddresses("requests", "outputs"))
    (greeting,) = lines.update(RANK, 1, [successor], 20.01).greetings
    assert greeting == (0, EngineGreeting(RANK, INCARNATION, 3, asks=True))
    assert lines.take_strangers(20.02) is None, "the answer was that of its predecessor"
    lines.answered(RouteTaken(session=3))
    assert lines.take_strangers(20.03) == []
