"""Matchers of grammars, within the limits that all of them have, and what they decide of patterns.

The library's automata never backtrack: time is linear in the text, whatever a client's pattern is.
"""

import functools
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only processes that meet a grammar load the library
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_SIZE = 128 * 1024
"""Characters of a grammar, all its parts together."""

_LEXER_STATES = 50_000
"""Maximum states of one compiled grammar; each takes one or two kilobytes."""
_BUILD_FUEL = 250_000
"""What may be spent on a grammar's lexer, in the library's units: schemas with a thousand
properties fit, but not repetitions of repetitions that would take hundreds of megabytes."""
_STEP_FUEL = 100_000
"""What may be spent on one mask, in the library's units: some ten milliseconds."""

_MAX_ROW_ITEMS, _MAX_STEP_ITEMS = 2000, 50_000
"""What the parser may have open at one place, and in all for one mask. A mask that cannot be
interrupted ends by these: the longest, which find that a row is too long, take a second."""

_QUOTED_LINE = re.compile(r"[ ^~]*$| *\d+ \||<non-verbose/>")

MAX_MASK_SECONDS = 0.02
"""Processor time of a grammar's first mask, from what is known of the grammar then."""
END_OF_TEXT = 256
"""The token that ends texts in a vocabulary of single bytes."""
NOTHING_FITS = "no text fits the grammar"


def new_matcher(tokenizer: "LLTokenizer", text: str) -> "LLMatcher":
    """Return a matcher at the beginning of a grammar; `grammar_error` says if it is one.

    Copies of a matcher share what they find out about the grammar, and there is a limit to it.
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
    """Return why no text fits the grammar of a new matcher, or None.

    The first mask, which takes longest, is known afterwards.
    """
    begun = matcher.deep_copy()
    seconds = _mask_seconds(begun)
    if seconds > MAX_MASK_SECONDS:  # without what is found out once for all, like lexer states
        seconds = _mask_seconds(matcher.deep_copy())
    if seconds > MAX_MASK_SECONDS and not begun.is_error():
        return (
            f"the grammar takes too long to follow: it takes {seconds * 1000:.0f} ms to find what "
            f"may come first, more than {MAX_MASK_SECONDS * 1000:.0f} ms; make it simpler"
        )
    if not begun.is_error() and len(begun.compute_ff_bytes()) > MAX_GRAMMAR_SIZE:
        return f"the grammar leaves no choice for more than {MAX_GRAMMAR_SIZE} characters"
    return told_briefly(begun.get_error()) if begun.is_error() else None


def _mask_seconds(matcher: "LLMatcher") -> float:
    """Return the processor time that the next mask takes."""
    began = time.thread_time()
    matcher.compute_bitmask()
    return time.thread_time() - began


class _Bytes:
    """A vocabulary of single bytes and special tokens, the first of which ends texts."""

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
    """Return a tokenizer of single bytes, which are their own ids, and some special tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Bytes(special_tokens)
    return LLTokenizer(
        TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=END_OF_TEXT
    )


def leads_nowhere(message: str) -> bool:
    """Whether one of the library's messages says that nothing fits the grammar any more."""
    return "NoExtension" in message


def told_briefly(message: str) -> str:
    """Return one of the library's messages, which may quote whole grammars, on a short line."""
    if leads_nowhere(message):
        return NOTHING_FITS
    lines = [line.strip() for line in message.splitlines() if not _QUOTED_LINE.match(line)]
    short = [line if len(line) <= 120 else line[:120] + "..." for line in lines]
    return " ".join(short)[:500]


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
