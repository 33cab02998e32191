"""Which tokens of an answer, with their log probabilities, make up its content."""

from collections.abc import Sequence

from server.answer.parts import CallBegin, ContentText, Part
from server.generate.fold import ScoredToken


class ContentScores:
    """Follows the parts of an answer through its text; a state machine without I/O.

    Parts are pieces of the text in its order. One that is not found in it, because its reader wrote
    it anew, is passed over.
    """

    def __init__(self) -> None:
        self._text = ""
        """What no part has been found in yet."""
        self._begin = 0
        """Where it begins in the whole text."""
        self._tokens: list[ScoredToken] = []
        """Those that begin within it, or behind it."""

    def add(self, text: str, tokens: Sequence[ScoredToken]) -> None:
        """Add text of the answer, and tokens whose texts have come or will come."""
        self._text += text
        self._tokens += tokens

    def of(self, part: Part) -> list[ScoredToken]:
        """Return the tokens that begin in a part's text if it is content; parts come in order."""
        text = part.name if isinstance(part, CallBegin) else part.text
        place = self._text.find(text)
        if place < 0:
            return []
        start, end = self._begin + place, self._begin + place + len(text)
        self._text, self._begin = self._text[place + len(text) :], end
        found = [token for token in self._tokens if start <= token.text_offset < end]
        self._tokens = [token for token in self._tokens if token.text_offset >= end]
        return found if isinstance(part, ContentText) else []
