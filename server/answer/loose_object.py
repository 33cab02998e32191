"""Objects as Gemma models write them: JSON without quotes, but for a mark around texts.

{city:<|"|>Oslo<|"|>,days:3}
"""

import json
import re

from server.text.markers import Until, certain_length, find_first

# A text that is never closed is scanned once.
_WORD = re.compile(r"(\"(?:\\.|[^\"\\])*+\"?)|([^\s{}\[\],:\"]+)(\s*:)?")


class LooseObject:
    """Reads one object and turns it into JSON."""

    def __init__(self, quote: str) -> None:
        """`quote` stands around texts."""
        self._quote = quote
        self._marks = (quote, "{", "}", "[", "]")
        self._text: Until | None = None
        """The text that the object goes on in, if it does."""
        self._structure: list[str] = []
        """What has come since the last text."""
        self._depth = 0
        self._held = ""
        self._json: list[str] = []
        self.done = False

    @property
    def json(self) -> str:
        """What has come, as JSON."""
        return "".join([*self._json, _quoted("".join(self._structure))])

    def push(self, text: str) -> str:
        """Add text; return what comes behind the object."""
        held, self._held = self._held + text, ""
        while held and not self.done:
            if self._text is not None:
                found = self._text.push(held)
                if found is None:
                    return ""
                self._json.append(json.dumps(found[0], ensure_ascii=False))
                held, self._text = found[2], None
                continue
            mark = find_first(held, self._marks)
            if mark is None:
                length = certain_length(held, self._marks)
                self._structure.append(held[:length])
                self._held = held[length:]
                return ""
            start, character = mark
            end = start + len(character)
            if character == self._quote:
                self._structure.append(held[:start])
                self._json.append(_quoted("".join(self._structure)))
                self._structure, self._text = [], Until([self._quote])
            else:
                self._structure.append(held[:end])
                self._depth += 1 if character in "{[" else -1
                self.done = not self._depth
            held = held[end:]
        return held


def _quoted(structure: str) -> str:
    """Return what stands between texts as JSON: words get quotes, but for JSON's own."""

    def word(match: re.Match[str]) -> str:
        quoted, text, colon = match.groups()
        if quoted is not None or (colon is None and _is_json(text)):
            return match[0]
        return json.dumps(text, ensure_ascii=False) + (colon or "")

    return _WORD.sub(word, structure)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
