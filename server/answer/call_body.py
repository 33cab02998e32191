"""What all bodies of calls have: each reads one call as its text comes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from server.answer.parameters import Schemas


class CallBody(ABC):
    """Reads one call.

    Where it breaks, or whether it is done, does not depend on how the text was cut.
    """

    def __init__(self, functions: Schemas, accepts: Callable[[str], bool]) -> None:
        """`functions` are those of the request; `accepts` says whether a name may be called."""
        self._functions = functions
        self._accepts = accepts
        self._arguments: list[str] = []
        """What has come of the arguments and has not been taken."""
        self.candidate: str | None = None
        """The name that was read, even if there may still be no call."""
        self.name: str | None = None
        """Set once it is certain that there is a call."""
        self.state: Literal["open", "done", "broken", "refused"] = "open"
        """broken: this is no call; refused: a JSON object, of a function that may not be called."""

    @property
    @abstractmethod
    def raw(self) -> str:
        """What was taken before the name was set."""

    @abstractmethod
    def push(self, text: str) -> str:
        """Add text; return what comes behind the call, or behind what could be one."""

    def take_arguments(self) -> str:
        """Return the arguments' text that has come since this was last called."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def finish(self) -> None:  # noqa: B027 - most calls that have not ended stay as they are
        """End: a call whose arguments can only be missing is done."""
