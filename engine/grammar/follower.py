"""Follows one request through its grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.grammar.compiler import CannotCompile, CompiledGrammar, GrammarCompiler
from engine.grammar_spec import told_briefly

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarFollower:
    """Where in its grammar a request's output is.

    Until the text `after` has been in the output the grammar has not begun: every token is
    allowed but those that end the output.
    """

    def __init__(self, grammar: CompiledGrammar, compiler: GrammarCompiler, after: str) -> None:
        self._grammar = grammar
        self._compiler = compiler
        self._matcher: LLMatcher | None = None
        self._tokens: list[int] = []
        """Of the part that the grammar is about."""
        self._marker = after.encode()
        self._seen = b""
        self._is_alone = False
        self.error: str | None = None
        """Why the output cannot go on."""
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
        """The token was added to the output; ignored after its end."""
        if self.ended:
            return
        if self._matcher is None:
            self._look_for_marker(token_id)
            return
        self._tokens.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._begin_again()

    def ahead(self, proposed: Sequence[int]) -> tuple[int, "LLMatcher | None"]:
        """Say what the draws after the output and after each of the proposed tokens depend on.

        Returns:
            How many draws the grammar has not begun for, and the matcher of the first of the
            others; None if there are none.
        """
        if self._matcher is not None:
            return 0, self._matcher
        seen = self._seen
        for count, token_id in enumerate(proposed, start=1):
            seen += self._bytes(token_id)
            if self._marker in seen and self._grammar.matcher is not None:
                return count, self._grammar.matcher.deep_copy()
        return len(proposed) + 1, None

    def has_to_refill(self) -> bool:
        """Whether the mask just computed is wrong, and can be computed again."""
        if self._matcher is None or self.error is not None or not self._matcher.is_error():
            return False
        self._begin_again()
        return self.error is None

    def _begin(self) -> None:
        if self._grammar.matcher is None:
            self.error = self._grammar.error or "the grammar was not compiled"
            return
        self._matcher = self._grammar.matcher.deep_copy()

    def _begin_again(self) -> None:
        """Follow the grammar anew with nothing shared, or give up.

        What requests with one grammar find out about it they share, and there is a limit to it.
        Who comes to the limit goes on alone, and the next to ask get a new start too.
        """
        assert self._matcher is not None
        reason = told_briefly(self._matcher.get_error())
        if not self._is_alone:
            self._is_alone = True
            self._compiler.forget(self._grammar)
            try:
                matcher = self._compiler.new_matcher(self._grammar.spec)
            except CannotCompile as error:
                self.error = str(error)
                return
            if matcher.consume_tokens(self._tokens):
                self._matcher = matcher
                return
        self.error = f"the output cannot follow its grammar: {reason}"

    def _look_for_marker(self, token_id: int) -> None:
        self._seen += self._bytes(token_id)
        if self._marker in self._seen:
            self._begin()
        else:
            self._seen = self._seen[-len(self._marker) :]

    def _bytes(self, token_id: int) -> bytes:
        text: bytes = self._compiler.tokenizer().decode_bytes([token_id])
        return text
