"""The scheduler's interface to grammars: compilation, and assignment to slots."""

from collections.abc import Callable
from typing import Any, Protocol

from engine.shared.messages import GrammarSpec


class Grammar(Protocol):
    """A grammar that is compiling, compiled or failed."""

    @property
    def settled(self) -> bool:
        """Whether compilation has finished, successfully or not."""

    @property
    def error(self) -> str | None:
        """Why it cannot be compiled, if it cannot."""

    @property
    def no_room(self) -> bool:
        """Whether it failed only for lack of capacity."""


class Grammars(Protocol):
    """Compiles grammars concurrently with the steps."""

    on_settled: Callable[[], None]
    """Called from another thread whenever a requested grammar is settled."""

    def request(self, spec: GrammarSpec, tenant: int) -> Grammar:
        """Return the grammar, compiled or not; it is cached while the result is referenced."""

    def assign(self, slot: int, grammar: Any) -> None:
        """Make the next request in the slot follow this settled grammar."""

    def release(self, slot: int) -> None:
        """Record that the slot no longer follows a grammar."""
