"""Which front ends an engine greets, and when all of them route to it."""

from engine.process.reception import CONFIRMATION_INTERVAL, FrontEndLinks, SendHello
from engine.shared.messages import FrontEndAddresses, FrontEndEntry, RouteHello, RouteTaken

GRACE, INTERVAL = 5.0, 1.0
RANK, INCARNATION = 1, 77


def lines_to(*indices: int) -> FrontEndLinks:
    links = FrontEndLinks(INCARNATION, "node", GRACE, INTERVAL)
    links.update(RANK, 1, entries(*indices), 0.0)
    return links


def entries(*indices: int) -> list[FrontEndEntry]:
    return [FrontEndEntry(i, 100 + i, FrontEndAddresses("requests", "outputs")) for i in indices]


def greeted(links: FrontEndLinks, now: float) -> dict[int, RouteHello]:
    return dict(each for each in links.tick(RANK, now) if isinstance(each, SendHello))


def test_hellos_are_repeated_until_each_front_end_has_answered() -> None:
    links = lines_to(0, 1)
    links.serve(10.0)
    assert all(hello.wants_reply for hello in greeted(links, 10.0).values())
    assert links.wait == CONFIRMATION_INTERVAL
    links.answered(RouteTaken(session=1))
    assert links.take_unconfirmed(10.01) is None
    assert all(hello.wants_reply for hello in greeted(links, 10.0 + CONFIRMATION_INTERVAL).values())
    links.answered(RouteTaken(session=2))
    assert links.take_unconfirmed(10.03) == []
    assert links.take_unconfirmed(10.04) is None, "it is said once"
    assert links.wait == INTERVAL
    assert not any(hello.wants_reply for hello in greeted(links, 12.0).values())


def test_engine_waits_for_successor_of_departed_front_end() -> None:
    links = lines_to(0, 1)
    links.serve(10.0)
    links.answered(RouteTaken(session=1))
    links.update(RANK, 1, entries(0), 10.01)
    assert links.take_unconfirmed(10.01) == []
    links.serve(20.0)
    successor = FrontEndEntry(0, 200, FrontEndAddresses("requests", "outputs"))
    *_, hello = links.update(RANK, 1, [successor], 20.01)
    assert hello == SendHello(0, RouteHello(RANK, INCARNATION, 3, wants_reply=True))
    assert links.take_unconfirmed(20.02) is None, "the answer was that of its predecessor"
    links.answered(RouteTaken(session=3))
    assert links.take_unconfirmed(20.03) == []
