"""What fills a place, wherever it runs: the one interface between policy and mechanism.

`server.fleet.keeper` decides when a place is filled; a `Starter` knows how. There is one for
processes of this node (`server.fleet.child`) and one for actors of a Ray cluster
(`server.fleet.ray.holder`).
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.shared.messages import ChildStatus


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program to run in a place."""

    name: str
    """For logs, e.g. `engine 0`."""
    module: str
    """Run as `python -m MODULE`."""
    launch: Any
    """A msgspec-encodable object of the type that the module reads from its lifeline."""
    environment: Mapping[str, str] = {}
    """Variables added to those that it inherits."""
    inherit: Sequence[int] = ()
    """File descriptors that stay open in it, under the same numbers; on this node only."""


class Ended(NamedTuple):
    """How the holder of a place ended."""

    code: int | None
    """Exit code; negative: the signal; None: unknown, as the node was lost with it."""
    how: str
    """For people, after the holder's name."""


def ended(code: int) -> Ended:
    """Return the end of a process with this exit code."""
    if code < 0:
        return Ended(code, f"was ended by {signal.Signals(-code).name}")
    return Ended(code, f"ended with exit code {code}")


class Holder(Protocol):
    """A process that fills a place, as seen from the supervisor."""

    @property
    def name(self) -> str:
        """The place's name."""

    @property
    def node(self) -> str:
        """Name of the node on which it runs; empty: this one, or none yet."""

    @property
    def last_lines(self) -> Sequence[str]:
        """The newest lines that it has printed."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""

    async def wait(self) -> Ended:
        """Wait until it has ended and all that it reported has been read."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it at once."""


class Starter(Protocol):
    """Starts a holder for a place."""

    async def __call__(
        self,
        program: Program,
        *,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
    ) -> Holder:
        """Start a program; what it reports and prints is passed on as it comes.

        Raises:
            OSError: nothing could be started.
        """
