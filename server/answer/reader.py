"""An answer's text as a message: first reasoning, then content and tool calls."""

from collections.abc import Sequence

from server.answer.parts import (
    AnswerParser,
    CallArguments,
    CallBegin,
    ContentText,
    Part,
    ReasoningText,
)
from server.answer.reasoning import ReasoningReader, ReasoningTokens


class AnswerReader:
    """Composes the parsers of reasoning and of tool calls.

    Whitespace between content and tool calls belongs to the format of the calls and is left out.

    Args:
        reasoning: splits off the reasoning; None if there is none.
        calls: finds tool calls in the rest; None if none are allowed.
        parallel: whether more than the first call is shown.
        show_reasoning: whether reasoning is part of the message.
        reasoning_end: the token that ends the reasoning; None if several do.
    """

    def __init__(
        self,
        reasoning: ReasoningReader | None,
        calls: AnswerParser | None,
        *,
        parallel: bool = True,
        show_reasoning: bool = True,
        reasoning_end: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self._show_reasoning = show_reasoning
        self._tokens = ReasoningTokens(reasoning_end)
        self._in_channels = 0
        """Tokens that came with reasoning that the parser of calls found."""
        self._whitespace: list[str] = []
        """Whitespace that came last: content, unless a call follows or has come before."""
        self.num_calls = 0
        """Tool calls that have begun."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens that were pushed were for reasoning."""
        reasoned = self._reasoning is not None and self._reasoning.reasoned
        return self._tokens.count if reasoned else self._in_channels

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """Add text and the tokens behind it; return the parts that are now certain."""
        self._tokens.push(token_ids)
        thought, said = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._thought(thought) + self._said(said, len(token_ids))

    def finish(self) -> list[Part]:
        """End: return what was held back."""
        thought, said = ("", "") if self._reasoning is None else self._reasoning.finish()
        parts = self._thought(thought) + self._said(said)
        if self._calls is not None:
            parts += self._shown(self._calls.finish())
        if self._whitespace and not self.num_calls:
            parts.append(ContentText("".join(self._whitespace)))
        return parts

    def _thought(self, text: str) -> list[Part]:
        return [ReasoningText(text)] if text and self._show_reasoning else []

    def _said(self, text: str, num_tokens: int = 0) -> list[Part]:
        if not text:
            return []
        if self._calls is None:
            return [ContentText(text)]
        parts = self._calls.push(text)
        if any(isinstance(part, ReasoningText) for part in parts):
            self._in_channels += num_tokens
        return self._shown(parts)

    def _shown(self, parts: list[Part]) -> list[Part]:
        shown: list[Part] = []
        for part in parts:
            match part:
                case ReasoningText(text):
                    shown += self._thought(text)
                case ContentText(text):
                    shown += self._content(text)
                case CallBegin():
                    self._whitespace = []
                    if self._parallel or part.index == 0:
                        self.num_calls = part.index + 1
                        shown.append(part)
                case CallArguments() if part.index < self.num_calls:
                    shown.append(part)
        return shown

    def _content(self, text: str) -> list[Part]:
        certain = text.rstrip()
        held, whitespace = self._whitespace, text[len(certain) :]
        if not certain:
            if whitespace:
                held.append(whitespace)
            return []
        self._whitespace = [whitespace] if whitespace else []
        return [ContentText("".join([*held, certain]))]
