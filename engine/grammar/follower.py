"""Follows one request through its grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from engine.grammar_spec import leads_nowhere, told_briefly

if TYPE_CHECKING:
    from llguidance import LLMatcher

_DEAD_END = "nothing that fits the grammar can follow the output"
_LIMITS = ("too many states", "too many expressions")
"""What a matcher says that another with nothing found out yet may get past."""


class GrammarFollower:
    """Where in its grammar a request's output is.

    Until the text `after` has been in the output the grammar has not begun: every token is
    allowed but those that end the output. Nothing here compiles or waits.
    """

    def __init__(self, grammar: CompiledGrammar, compiler: GrammarCompiler, after: str) -> None:
        self._grammar = grammar
        self._compiler = compiler
        self._matcher: LLMatcher | None = None
        self._marker = after.encode()
        self._seen = b""
        self.error: str | None = None
        """Why the output cannot go on."""
        self.forbidden = False
        """What was drawn is no token that the grammar allows: something else ruled these out."""
        self.stalled: str | None = None
        """Why the output cannot go on before its grammar has been compiled anew."""
        if not after:
            self._begin()

    @property
    def ended(self) -> bool:
        """Whether nothing can be added to the output: it is complete, or there is an error."""
        if self.error is not None:
            return True
        matcher = self._matcher
        return matcher is not None and matcher.is_stopped() and not matcher.is_error()

    def advance(self, token_id: int) -> None:
        """The token was added to the output; ignored after its end, and once it is stalled."""
        if self.stalled is not None or self.ended:
            return
        if self._matcher is None:
            self._look_for_marker(token_id)
        elif not self._matcher.consume_token(token_id):
            self._stop(self._matcher)
        elif self._matcher.is_stopped() and not self._matcher.is_accepting():
            self.error = _DEAD_END

    def ahead(self, proposed: Sequence[int]) -> tuple[int, "LLMatcher | None"]:
        """Say what the draws after the output and after each of the proposed tokens depend on.

        Returns:
            How many draws the grammar has not begun for, and the matcher of the first of the
            others; None if there are none.
        """
        if self.stalled is not None or self.error is not None:
            return len(proposed) + 1, None
        if self._matcher is not None:
            return 0, self._matcher
        seen = self._seen
        for count, token_id in enumerate(proposed, start=1):
            seen += self._bytes(token_id)
            if self._marker in seen and self._grammar.matcher is not None:
                return count, self._grammar.matcher.deep_copy()
        return len(proposed) + 1, None

    def mask_computed(self) -> bool:
        """Take note of a mask that was computed; whether it can be used."""
        matcher = self._matcher
        if matcher is not None and matcher.is_error() and self.error is None:
            self._stop(matcher)
        return self.error is None and self.stalled is None

    def _begin(self) -> None:
        if self._grammar.matcher is None:
            self.error = self._grammar.error or "the grammar was not compiled"
            return
        self._matcher = self._grammar.matcher.deep_copy()

    def _stop(self, matcher: "LLMatcher") -> None:
        """Note why the matcher failed.

        What requests with one grammar find out about it they share, and there is a limit to it.
        Who comes to the limit needs a new start, and so do all that ask from now on.
        """
        message = matcher.get_error()
        reason = f"the output cannot follow its grammar: {told_briefly(message)}"
        if any(limit in message for limit in _LIMITS):
            self._compiler.forget(self._grammar)
            self.stalled = reason
        elif leads_nowhere(message):
            self.error = _DEAD_END
        else:
            self.forbidden = True
            self.error = reason

    def _look_for_marker(self, token_id: int) -> None:
        self._seen += self._bytes(token_id)
        if self._marker in self._seen:
            self._begin()
        else:
            self._seen = self._seen[-len(self._marker) :]

    def _bytes(self, token_id: int) -> bytes:
        text: bytes = self._compiler.tokenizer().decode_bytes([token_id])
        return text
