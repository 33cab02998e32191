"""Calls as bare JSON objects, one after the other or as the elements of an array."""

from collections.abc import Callable

from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.tool_calls.call_object import CallObject


class CallListParser:
    """Reads objects with separators between them; whatever is no call is content.

    Args:
        separators: characters that may stand before, between and behind the objects.
        accepts: whether a name is that of a call; what else has one is content.
        arguments_required: an object without arguments is content.
    """

    def __init__(
        self,
        separators: str,
        *,
        accepts: Callable[[str], bool] = lambda name: True,
        arguments_required: bool = False,
    ) -> None:
        self._separators = separators
        self._accepts = accepts
        self._arguments_required = arguments_required
        self._skipped: list[str] = []
        """Separators that came since the last call: content if none follows."""
        self._object: CallObject | None = None
        self._pending: list[str] = []
        """What has been read of the object that may still be content."""
        self._begun = False
        self._count = 0
        self._over = False

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        parts: list[Part] = []
        while text and not self._over:
            text = self._between(text) if self._object is None else self._in_call(text, parts)
        if text:
            parts.append(ContentText(text))
        return parts

    def finish(self) -> list[Part]:
        """End: return what was held back as the content that it is."""
        left = ""
        if self._object is not None:
            left = "" if self._begun else "".join([*self._skipped, *self._pending])
        elif not self._count:
            left = "".join(self._skipped)
        return [ContentText(left)] if left and not self._over else []

    def _between(self, text: str) -> str:
        rest = text.lstrip(self._separators)
        self._skipped.append(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self._object = CallObject(arguments_required=self._arguments_required)
            self._begun, self._pending = False, []
        elif rest:
            self._over = True
            return rest if self._count else "".join([*self._skipped, rest])
        return rest

    def _in_call(self, text: str, parts: list[Part]) -> str:
        call = self._object
        assert call is not None
        rest = call.push(text)
        if not self._begun:
            self._pending.append(text[: len(text) - len(rest)])
        known = call.name is not None and self._accepts(call.name)
        if known and call.name is not None:
            if not self._begun:
                self._begun = True
                self._skipped = []
                parts.append(CallBegin(self._count, call.name))
            if arguments := call.take_arguments():
                parts.append(CallArguments(self._count, arguments))
        elif call.name is not None or call.state != "open":
            self._over = True
            return "".join([*self._skipped, *self._pending, rest])
        if call.state != "open":
            self._object = None
            self._count += 1
        return rest
