"""Decides about patterns of clients with the automata of the library that enforces grammars.

They never backtrack: time is linear in the text, whatever the pattern is.
"""

import re
from typing import TYPE_CHECKING

from engine.shared.matchers import (
    END_OF_TEXT,
    NOTHING_FITS,
    byte_tokenizer,
    grammar_error,
    new_matcher,
    told_briefly,
)

if TYPE_CHECKING:  # only processes that meet a grammar load the library
    from llguidance import LLMatcher

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9]")
_PART = re.compile(r"\\.|[][()|]", re.DOTALL)


class Expression:
    """A regular expression, compiled once for many texts.

    Raises:
        ValueError: it is none, or has look-around or back-references.
    """

    def __init__(self, pattern: str) -> None:
        self._matcher = _matcher(f"/{_in_lark(pattern)}/")
        if self._matcher.is_error():
            raise ValueError(told_briefly(self._matcher.get_error()))

    def matches(self, text: str) -> bool:
        """Whether it matches the whole text; takes 50 ns a byte."""
        tokens = [*text.encode("utf-8", "replace"), END_OF_TEXT]
        return self._matcher.validate_tokens(tokens) == len(tokens)


def is_enforceable(pattern: str) -> bool:
    """Whether the library can hold a string of JSON to a pattern."""
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def keys_of(pattern: str, names: list[str]) -> list[str] | None:
    """Return the names that a pattern is found in; None if it is found in other texts too."""
    anywhere = _searched(pattern)
    others = "|".join(map(literal, filter(None, names)))
    try:
        rest = _matcher(f"/{_in_lark(anywhere)}/ & ~/({others})?/")
        if grammar_error(rest) != NOTHING_FITS:
            return None
        expression = Expression(anywhere)
    except ValueError:
        return None  # what is wrong with it is said where the schema is compiled
    return [name for name in names if expression.matches(name)]


def literal(text: str) -> str:
    """Return a regular expression that matches this text only."""
    return _NOT_PLAIN.sub(lambda found: f"\\x{{{ord(found.group()):x}}}", text)


def _matcher(expression: str) -> "LLMatcher":
    from llguidance import LLMatcher

    lark = f"start: TEXT\nTEXT: {expression}"
    return new_matcher(byte_tokenizer(()), LLMatcher.grammar_from_lark(lark))


def _in_lark(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern, use_ascii="dw")  # as JSON schemas have it


def _searched(pattern: str) -> str:
    """Return an expression for all texts in which a pattern is found."""
    found = []
    for each in _alternatives(pattern):
        bare = each.removeprefix("^")
        before = "" if bare != each else r"(.|\n)*"
        is_anchored = bare.endswith("$") and not bare.endswith(r"\$")
        after = "" if is_anchored else r"(.|\n)*"
        found.append(f"{before}({bare[:-1] if is_anchored else bare}){after}")
    return "|".join(found)


def _alternatives(pattern: str) -> list[str]:
    """Return what stands between the bars of a pattern that are in no group."""
    found, start, depth, in_class = [], 0, 0, False
    for part in _PART.finditer(pattern):
        match part.group():
            case "[":
                in_class = True
            case "]":
                in_class = False
            case "(" | ")" as parenthesis if not in_class:
                depth += 1 if parenthesis == "(" else -1
            case "|" if not in_class and not depth:
                found.append(pattern[start : part.start()])
                start = part.end()
    return [*found, pattern[start:]]
