"""Orders for all engines of a group."""

from coordinator.adapters import FleetOrders
from engine.core.halting import calls_between
from engine.shared.messages import FleetOrder, FleetRequest


def names(before: FleetOrder, after: FleetOrder) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, dict(call.arguments)) for call in calls_between(before, after)]


def test_a_repeated_request_counts_once() -> None:
    orders = FleetOrders()
    request = FleetRequest(7, "pause", "wait")
    assert orders.handle_request(request)
    assert not orders.handle_request(request)
    assert (orders.order.revision, orders.order.pause) == (1, "wait")


def test_restarted_coordinator_learns_order_from_members() -> None:
    first = FleetOrders()
    for ticket in (1, 2):
        first.handle_request(FleetRequest(ticket, "sleep", level=2))
    second = FleetOrders()
    second.handle_request(FleetRequest(3, "resume"))
    assert second.adopt_newer(first.order)
    assert second.order.sleep_level == 2
    assert second.handle_request(FleetRequest(3, "resume")), "it was lost with the order before"
    assert not second.adopt_newer(first.order)


def test_starting_engines_follow_earlier_orders() -> None:
    orders, new = FleetOrders(), FleetOrder(0)
    assert names(new, orders.order) == []
    orders.handle_request(FleetRequest(1, "pause", "abort"))
    orders.handle_request(FleetRequest(2, "sleep", level=1))
    orders.handle_request(FleetRequest(3, "wake_up", tags=["weights"]))
    assert names(new, orders.order) == [
        ("sleep", {"level": 1, "mode": "keep"}),
        ("wake_up", {"tags": "weights"}),
        ("pause", {"mode": "abort"}),
    ]


def test_resume_order_does_not_wake_engine_put_to_sleep_individually() -> None:
    orders = FleetOrders()
    orders.handle_request(FleetRequest(1, "pause", "keep"))
    paused = orders.order
    orders.handle_request(FleetRequest(2, "resume"))
    assert names(paused, orders.order) == [("resume", {})]


def test_the_last_tag_ends_a_sleep() -> None:
    orders = FleetOrders()
    orders.handle_request(FleetRequest(1, "sleep", level=2))
    asleep = orders.order
    orders.handle_request(FleetRequest(2, "wake_up", tags=["weights"]))
    half = orders.order
    assert half.sleep_level == 2
    assert names(asleep, half) == [("wake_up", {"tags": "weights"})]
    orders.handle_request(FleetRequest(3, "wake_up", tags=["kv_cache"]))
    assert orders.order.sleep_level is None
    assert names(half, orders.order) == [("wake_up", {})]


def test_sleep_at_level_0_ends_with_any_wake_up_tag() -> None:
    orders = FleetOrders()
    orders.handle_request(FleetRequest(1, "sleep", level=0))
    orders.handle_request(FleetRequest(2, "wake_up", tags=["scheduling"]))
    assert orders.order.sleep_level is None
