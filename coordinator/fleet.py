"""What operators want of all engines of a group: the one place that decides, without I/O."""

from msgspec.structs import replace

from engine.shared.messages import ASLEEP_TAGS, FleetOrder, FleetWish

_MAX_TICKETS = 16
"""Wishes that are remembered, so that none counts twice."""


class FleetOrders:
    """The newest order; a coordinator that starts again has it from the members that join."""

    def __init__(self) -> None:
        self.order = FleetOrder(0)

    def brought(self, order: FleetOrder | None) -> bool:
        """A member that registers knows this order; whether it is newer than the one here."""
        if order is None or order.revision <= self.order.revision:
            return False
        self.order = order
        return True

    def wished(self, wish: FleetWish) -> bool:
        """Follow a wish; False if that was done before."""
        before = self.order
        if wish.ticket in before.tickets:
            return False
        revision = before.revision + 1
        tickets = [*before.tickets, wish.ticket][-_MAX_TICKETS:]
        after = replace(before, revision=revision, tickets=tickets)
        match wish.action:
            case "pause":
                after = replace(after, pause=wish.mode, pause_revision=revision)
            case "resume":
                after = replace(after, pause=None, pause_revision=revision)
            case "sleep":
                mode = "keep" if wish.mode == "wait" else wish.mode
                after = replace(
                    after,
                    sleep_level=wish.level,
                    sleep_mode=mode,
                    woken=[],
                    sleep_revision=revision,
                )
            case "wake_up":
                woken = sorted({*before.woken, *(wish.tags or ASLEEP_TAGS)})
                is_over = not before.sleep_level or set(woken) >= set(ASLEEP_TAGS)
                after = replace(
                    after,
                    sleep_level=None if is_over else before.sleep_level,
                    woken=[] if is_over else woken,
                    sleep_revision=revision,
                )
            case "weights":
                after = replace(after, weights=wish.weights)
        self.order = after
        return True
