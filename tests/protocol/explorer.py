"""Model checker: visits every reachable state of a system of state machines.

Safety: no transition may raise `Violation`. Liveness: from every reachable state a final state is
reachable that is followed only by final states. So if every transition that is possible infinitely
often eventually happens (strong fairness), the system ends in final states, in any order.
"""

import copy
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

State = tuple[Any, ...]
Label = tuple[Any, ...]


class Violation(Exception):
    """A safety property was violated."""


class System(Protocol):
    """A system to explore."""

    def initial(self) -> State: ...

    def successors(self, state: State) -> Iterable[tuple[Label, State]]:
        """Return all possible transitions.

        Raises:
            Violation: a transition violates a safety property.
        """
        ...

    def is_final(self, state: State) -> bool: ...


class Problem(NamedTuple):
    """A violated property, and the shortest trace to it."""

    kind: str
    text: str
    trace: list[Label]

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:3} {label}" for number, label in enumerate(self.trace, 1))
        return f"{self.kind}: {self.text}\n{steps}"


@dataclass(frozen=True)
class Result:
    """Results of an exploration."""

    states: int
    transitions: int
    seconds: float
    problem: Problem | None

    def __str__(self) -> str:
        found = "no problem" if self.problem is None else f"{self.problem.kind} found"
        return (
            f"{self.states:,} states, {self.transitions:,} transitions "
            f"in {self.seconds:.1f} s: {found}"
        )


class TooLarge(Exception):
    """The system has more states than the caller allows."""


def explore(system: System, *, max_states: int = 2_000_000, settles: bool = True) -> Result:
    """Visit every reachable state, breadth first.

    With `settles` a final state must never be left; without, it may be left temporarily.

    Raises:
        TooLarge: there are more than `max_states` states.
    """
    began = time.perf_counter()
    first = system.initial()
    numbers = {first: 0}
    states = deque([first])
    parents = array("q", [-1])
    labels: list[Label] = [()]
    sources, targets = array("q"), array("q")
    final = bytearray([system.is_final(first)])

    def visit(source: int, label: Label, successor: State) -> None:
        target = numbers.get(successor)
        if target is None:
            target = len(numbers)
            if target == max_states:
                raise TooLarge(f"more than {max_states:,} states")
            numbers[successor] = target
            states.append(successor)
            parents.append(source)
            labels.append(label)
            final.append(system.is_final(successor))
        sources.append(source)
        targets.append(target)

    def trace(number: int) -> list[Label]:
        steps = []
        while number > 0:
            steps.append(labels[number])
            number = parents[number]
        return steps[::-1]

    def result(problem: Problem | None) -> Result:
        return Result(len(numbers), len(targets), time.perf_counter() - began, problem)

    source = -1
    while states:
        source += 1
        state = states.popleft()
        try:
            for label, successor in system.successors(state):
                visit(source, label, successor)
        except Violation as violation:
            return result(Problem("violation", str(violation), trace(source)))
    text = _judge(final, sources, targets, settles)
    if text is None:
        return result(None)
    return result(Problem(text[0], text[1], trace(text[2])))


def _judge(
    final: bytearray, sources: "array[int]", targets: "array[int]", settles: bool
) -> tuple[str, str, int] | None:
    """Return (kind, text, state) of a state from which no good end is reachable."""
    is_final = np.frombuffer(final, dtype=np.uint8).astype(bool)
    source = np.frombuffer(sources, dtype=np.int64)
    target = np.frombuffer(targets, dtype=np.int64)
    by_target = np.argsort(target, kind="stable")
    starts = np.searchsorted(target[by_target], np.arange(len(final) + 1))

    def can_reach(goal: "np.ndarray[Any, np.dtype[np.bool_]]") -> Any:
        reaching = goal.copy()
        frontier = np.flatnonzero(reaching)
        while len(frontier):
            incoming = [by_target[starts[node] : starts[node + 1]] for node in frontier]
            before = np.unique(source[np.concatenate(incoming)])
            frontier = before[~reaching[before]]
            reaching[frontier] = True
        return reaching

    stays_final = ~can_reach(~is_final)
    stuck = np.flatnonzero(~can_reach(stays_final))
    if len(stuck):
        text = f"{len(stuck)} of {len(final)} states can never come to a good end"
        return ("no way to the end", text, int(stuck[0]))
    relapse = np.flatnonzero(is_final & ~stays_final)
    if settles and len(relapse):
        return ("relapse", "the end is left again", int(relapse[0]))
    return None


Machine = TypeVar("Machine")


class Arena(Generic[Machine]):
    """Production objects by number, with memoized transitions.

    Objects with equal `view` are identified: `view` returns the relevant state of an object.
    """

    def __init__(self, view: Callable[[Machine], Hashable]) -> None:
        self.objects: list[Machine] = []
        self._view = view
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[tuple[int, Hashable], tuple[int, Any]] = {}

    def intern(self, machine: Machine) -> int:
        """Return the number of an object, which must not be modified afterwards."""
        key = self._view(machine)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.objects)
            self.objects.append(machine)
        return number

    def apply(
        self, number: int, event: Hashable, act: Callable[[Machine], Hashable]
    ) -> tuple[int, Any]:
        """Return the object's number after `act`, and the result of `act`.

        `event` identifies `act`: the same event on the same object has the same effect.
        """
        key = (number, event)
        known = self._known.get(key)
        if known is None:
            machine = copy.deepcopy(self.objects[number])
            returned = act(machine)
            known = self._known[key] = (self.intern(machine), returned)
        return known


def freeze(value: Any) -> Hashable:
    """Return a hashable snapshot of a value and everything it contains."""
    if value is None or isinstance(value, int | float | str | bytes | Enum):
        return value
    if isinstance(value, dict):
        return tuple(sorted((freeze(key), freeze(each)) for key, each in value.items()))
    if isinstance(value, set | frozenset):
        return frozenset(freeze(each) for each in value)
    if isinstance(value, list | tuple):
        return tuple(freeze(each) for each in value)
    return (type(value).__name__, freeze(vars(value)))
