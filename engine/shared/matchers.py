"""Grammar matchers with resource limits, and queries about patterns.

The library's automata never backtrack: time is linear in the text for any pattern.
"""

import functools
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loaded only by processes that use grammars
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_SIZE = 128 * 1024
"""Maximum characters of a grammar over all of its parts."""

_LEXER_STATES = 50_000
"""Maximum states of one compiled grammar; each takes 1 to 2 KB."""
_BUILD_FUEL = 250_000
"""Limit on the cost of building a lexer, in the library's units: schemas with a thousand
properties fit, but not nested repetitions that would take hundreds of megabytes."""
_STEP_FUEL = 100_000
"""Limit on the lexer's cost of one mask, in the library's units: about 10 ms."""

_MAX_ROW_ITEMS, _MAX_STEP_ITEMS = 2000, 50_000
"""Limits of the parser's items per row, and per mask. A mask cannot be interrupted, so these bound
it: the longest, which fail because a row is too long, take a second."""

_QUOTED_LINE = re.compile(r"[ ^~]*$| *\d+ \||<non-verbose/>")

MAX_MASK_SECONDS = 0.02
"""Maximum processor time of a grammar's first mask once its lexer states are cached."""
END_OF_TEXT = 256
"""The end token of the byte vocabulary."""
NOTHING_FITS = "no text fits the grammar"


def new_matcher(tokenizer: "LLTokenizer", text: str) -> "LLMatcher":
    """Return a matcher at the start of a grammar; check it with `grammar_error`.

    Copies of a matcher share a bounded cache of lexer states.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_BUILD_FUEL,
        max_lexer_states=_LEXER_STATES,
        step_lexer_fuel=_STEP_FUEL,
        max_items_in_row=_MAX_ROW_ITEMS,
        step_max_items=_MAX_STEP_ITEMS,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


def grammar_error(matcher: "LLMatcher") -> str | None:
    """Return why a new matcher's grammar is unusable, None if it is usable.

    Computes the first mask, which is the slowest, so its lexer states are cached afterwards.
    """
    begun = matcher.deep_copy()
    seconds = _mask_seconds(begun)
    if seconds > MAX_MASK_SECONDS:  # measure again with the lexer states cached
        seconds = _mask_seconds(matcher.deep_copy())
    if seconds > MAX_MASK_SECONDS and not begun.is_error():
        return (
            f"the grammar takes too long to follow: it takes {seconds * 1000:.0f} ms to find the "
            f"allowed first tokens, more than {MAX_MASK_SECONDS * 1000:.0f} ms; make it simpler"
        )
    if not begun.is_error() and len(begun.compute_ff_bytes()) > MAX_GRAMMAR_SIZE:
        return f"the grammar leaves no choice for more than {MAX_GRAMMAR_SIZE} characters"
    return shortened_message(begun.get_error()) if begun.is_error() else None


def _mask_seconds(matcher: "LLMatcher") -> float:
    """Compute the next mask and return its processor time in seconds."""
    began = time.thread_time()
    matcher.compute_bitmask()
    return time.thread_time() - began


class _Bytes:
    """A vocabulary of single bytes and special tokens, the first of which is the end token."""

    def __init__(self, special_tokens: tuple[str, ...]) -> None:
        self.eos_token_id = END_OF_TEXT
        self.bos_token_id = None
        specials = [token.encode() for token in ("<|end|>", *special_tokens)]
        self.tokens = [bytes([value]) for value in range(256)] + specials
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.lru_cache(maxsize=4)
def byte_tokenizer(special_tokens: tuple[str, ...]) -> "LLTokenizer":
    """Return a tokenizer of single bytes (id = byte value) and some special tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Bytes(special_tokens)
    return LLTokenizer(
        TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=END_OF_TEXT
    )


def is_dead_end(message: str) -> bool:
    """Return whether a library message says that no continuation fits the grammar."""
    return "NoExtension" in message


def shortened_message(message: str) -> str:
    """Shorten a library message, which can quote whole grammars, to one short line."""
    if is_dead_end(message):
        return NOTHING_FITS
    lines = [line.strip() for line in message.splitlines() if not _QUOTED_LINE.match(line)]
    short = [line if len(line) <= 120 else line[:120] + "..." for line in lines]
    return " ".join(short)[:500]


_NOT_PLAIN = re.compile(r"[^A-Za-z0-9]")
_PART = re.compile(r"\\.|[][()|]", re.DOTALL)


class Expression:
    """A regular expression, compiled once for many texts.

    Raises:
        ValueError: it is invalid, or has look-around or back-references.
    """

    def __init__(self, pattern: str) -> None:
        self._matcher = _matcher(f"/{_in_lark(pattern)}/")
        if self._matcher.is_error():
            raise ValueError(shortened_message(self._matcher.get_error()))

    def matches(self, text: str) -> bool:
        """Return whether the expression matches the entire text (about 50 ns per byte)."""
        tokens = [*text.encode("utf-8", "replace"), END_OF_TEXT]
        return self._matcher.validate_tokens(tokens) == len(tokens)


def is_enforceable(pattern: str) -> bool:
    """Return whether the library can enforce a pattern on a JSON string."""
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def keys_of(pattern: str, names: list[str]) -> list[str] | None:
    """Return the names that a pattern matches; None if it can match other texts too."""
    anywhere = _searched(pattern)
    others = "|".join(map(literal, filter(None, names)))
    try:
        rest = _matcher(f"/{_in_lark(anywhere)}/ & ~/({others})?/")
        if grammar_error(rest) != NOTHING_FITS:
            return None
        expression = Expression(anywhere)
    except ValueError:
        return None  # the error is reported when the schema is compiled
    return [name for name in names if expression.matches(name)]


def literal(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return _NOT_PLAIN.sub(lambda found: f"\\x{{{ord(found.group()):x}}}", text)


def _matcher(expression: str) -> "LLMatcher":
    from llguidance import LLMatcher

    lark = f"start: TEXT\nTEXT: {expression}"
    return new_matcher(byte_tokenizer(()), LLMatcher.grammar_from_lark(lark))


def _in_lark(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern, use_ascii="dw")  # as JSON schemas have it


def _searched(pattern: str) -> str:
    """Return an expression that matches entire texts in which the pattern is found."""
    found = []
    for each in _alternatives(pattern):
        bare = each.removeprefix("^")
        before = "" if bare != each else r"(.|\n)*"
        is_anchored = bare.endswith("$") and not bare.endswith(r"\$")
        after = "" if is_anchored else r"(.|\n)*"
        found.append(f"{before}({bare[:-1] if is_anchored else bare}){after}")
    return "|".join(found)


def _alternatives(pattern: str) -> list[str]:
    """Split a pattern at its top-level bars."""
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
