"""What the scheduler needs of grammars: which are compiled, and which slots follow one."""

from collections.abc import Callable
from typing import Any, Protocol

from engine.shared.messages import GrammarSpec


class Grammar(Protocol):
    """A grammar that is being compiled, has been, or cannot be."""

    @property
    def settled(self) -> bool:
        """Whether it is known how the compilation ended."""

    @property
    def error(self) -> str | None:
        """Why it cannot be compiled."""

    @property
    def no_room(self) -> bool:
        """Whether it could be, were there more room."""


class Grammars(Protocol):
    """Compiles grammars beside the steps."""

    on_settled: Callable[[], None]
    """Called by another thread whenever a grammar that was asked for is settled."""

    def ask(self, spec: GrammarSpec, tenant: int) -> Grammar:
        """Return the grammar, compiled or not; it is kept while the answer is."""

    def assign(self, slot: int, grammar: Any) -> None:
        """The next request in the slot follows this grammar, which is settled."""

    def release(self, slot: int) -> None:
        """The request that was in the slot follows its grammar no longer."""
