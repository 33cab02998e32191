"""Engine groups: independent clusters behind one coordinator.

While one model replaces another both are served, each by the engines and front ends of a separate
group (`--engine-group`). Each group has separate ranks, agreed settings, views and waves: a
`CoordinatorState` that is unaware of the other groups. Published messages carry the group's name.
"""

import dataclasses
from collections.abc import Callable

from msgspec.structs import replace

from coordinator.events import (
    Action,
    Event,
    FromMember,
    Notice,
    PublishOrder,
    PublishView,
    Reply,
    Tick,
)
from coordinator.state import CoordinatorParameters, CoordinatorState
from engine.shared.messages import (
    AdapterRequest,
    AdaptersInUse,
    ClusterView,
    Draining,
    FleetRequest,
    Goodbye,
    Heartbeat,
    Hello,
    NodeReport,
    ProcessEntry,
    Ready,
    Refused,
    TenantsInUse,
    WakeUp,
)
from engine.shared.process_state import Descriptors

MEMBER_DESCRIPTORS = 3
"""Connections per engine; a front end has two."""

RESERVED_DESCRIPTORS = 64
"""Descriptors kept free for health checks and for members that have been refused."""

MAX_GROUPS = 64
"""Maximum concurrent groups; usually at most two, while one replaces the other."""


class EngineGroups:
    """All groups of a coordinator; dispatches events to them."""

    def __init__(
        self,
        parameters: CoordinatorParameters,
        expected: Callable[[str], int | None] = lambda group: None,
        own_group: str = "",
    ) -> None:
        """Make the registry with the unnamed group.

        Args:
            expected: returns the expected number of engines of a group, None if unknown.
            own_group: group of this node's engines, to which `planned_engines` applies.
        """
        self._own_group = own_group
        self._parameters = parameters
        self._expected = expected
        self._groups = {"": self._state("", parameters.epoch)}
        self._num_created = 1
        self._started_at: float | None = None
        self.descriptors: Descriptors | None = None
        """Open file descriptors of this process and their limit, as last counted."""
        self.process: ProcessEntry | None = None
        """This process's entry in published views."""

    def reload_expected(self) -> None:
        """Reread the expected number of engines of each group.

        Raises:
            OSError, ValueError: the file is unusable; the numbers stay unchanged.
        """
        numbers = {name: self._expected(name) for name in self._groups}
        for name, number in numbers.items():
            self._groups[name].expect(number)

    @property
    def names(self) -> list[str]:
        """Names of all groups, the unnamed one first."""
        return list(self._groups)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event at `now` (seconds, monotonic) and return the resulting actions."""
        if self._started_at is None:
            self._started_at = now
        match event:
            case FromMember(sender, NodeReport() as report):
                return self._in_group(report.group, sender, event, now)
            case FromMember(sender, Hello() as hello):
                return self._hello(sender, hello, event, now)
            case FromMember(_, Goodbye()):
                actions = self._all(event, now)  # ignored by groups without this member
            case FromMember(_, (Ready() | Heartbeat() | Draining()) as message):
                knowing = (name for name, each in self._groups.items() if each.knows(message))
                return self._one(next(knowing, ""), event, now)
            case WakeUp() | AdapterRequest() | AdaptersInUse() | FleetRequest() | TenantsInUse():
                return self._one(event.group, event, now) if event.group in self._groups else []
            case _:
                actions = self._all(event, now)
        if isinstance(event, Tick):
            empty = [name for name, each in self._groups.items() if name and each.is_empty]
            for name in empty:
                del self._groups[name]
                actions.append(Notice(f"engine group {name} has ended"))
        return actions

    def next_deadline(self, now: float) -> float:
        """Return the latest time at which `Tick` has to be handled."""
        return min(group.next_deadline(now) for group in self._groups.values())

    def _hello(self, sender: bytes, hello: Hello, event: Event, now: float) -> list[Action]:
        count, limit = self.descriptors or (0, 0)
        is_known = hello.group in self._groups and self._groups[hello.group].knows(hello)
        if is_known or not limit or count + MEMBER_DESCRIPTORS <= limit - RESERVED_DESCRIPTORS:
            return self._in_group(hello.group, sender, event, now)
        reason = (
            f"the coordinator has {count} of {limit} file descriptors open, and a member takes up "
            f"to {MEMBER_DESCRIPTORS}: raise its hard limit (ulimit -Hn, LimitNOFILE=)"
        )
        return [Reply(sender, Refused(reason, field="descriptors", final=False))]

    def _in_group(self, name: str, sender: bytes, event: Event, now: float) -> list[Action]:
        """Dispatch an event to a group, which is created if it is new and the member joins."""
        is_new = name not in self._groups
        if is_new and len(self._groups) >= MAX_GROUPS:
            reason = f"there are {MAX_GROUPS} engine groups already"
            return [Reply(sender, Refused(reason, field="engine_group"))]
        if is_new:
            # For members of a forgotten group of that name, this looks like a coordinator restart.
            epoch = self._parameters.epoch + self._num_created
            self._groups[name] = self._state(name, epoch)
            self._groups[name].start(now if self._started_at is None else self._started_at)
        actions = self._one(name, event, now)
        if is_new and self._groups[name].is_empty:  # it was refused
            del self._groups[name]
        elif is_new:
            self._num_created += 1
            actions.insert(0, Notice(f"engine group {name} begins"))
        return actions

    def _state(self, name: str, epoch: int) -> CoordinatorState:
        parameters = dataclasses.replace(
            self._parameters,
            epoch=epoch,
            expected_engines=self._expected(name),
            planned_engines=self._parameters.planned_engines if name == self._own_group else None,
        )
        return CoordinatorState(parameters)

    def _all(self, event: Event, now: float) -> list[Action]:
        return [action for name in self._groups for action in self._one(name, event, now)]

    def _one(self, name: str, event: Event, now: float) -> list[Action]:
        return [self._addressed(each, name) for each in self._groups[name].handle(event, now)]

    def _completed(self, view: ClusterView, group: str) -> ClusterView:
        own = [] if self.process is None else [self.process]
        count = self.descriptors or (0, 0)
        return replace(view, group=group, descriptors=count, processes=own + view.processes)

    def _addressed(self, action: Action, group: str) -> Action:
        """Add the group's name to published messages and log notices."""
        match action:
            case PublishView(view, change):
                if change is not None:
                    change = replace(change, view=self._completed(change.view, group))
                return PublishView(self._completed(view, group), change)
            case PublishOrder(order) if group:
                return PublishOrder(replace(order, group=group))
            case Notice(text) if group:
                return Notice(f"{text} (engine group {group})")
            case _:
                return action
