"""What grammars of requests may say, and their form for the library that enforces them.

Front ends check a grammar here before anything is queued, and engines compile it from the same
form. Both must do so in a thread of `GrammarThreads`: what clients send may take a while to
analyse, and nests deeper than an ordinary thread's stack has room for.
"""

import contextlib
import functools
import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from engine.shared import grammar_schema
from engine.shared.messages import (
    ChoiceGrammar,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)

if TYPE_CHECKING:  # only processes that meet a grammar load the library
    from llguidance import LLMatcher, LLTokenizer

P = ParamSpec("P")
T = TypeVar("T")

MAX_GRAMMAR_SIZE = 128 * 1024
"""Characters of a grammar, all its parts together."""
MAX_GBNF_SIZE = 32 * 1024
"""Characters of a grammar in GBNF, whose conversion takes long when it is long."""
MAX_RULES = 5000
"""Rules of a grammar in Lark or GBNF, which is also how deep a chain of them may be: each takes the
library up to six kilobytes of a stack."""
MAX_GROUPS = 10_000
"""Rules and parentheses of such a grammar; the library's time grows with the square of it."""
MAX_MARKER_SIZE = 1024
"""Characters of the text after which a grammar applies."""

SOME_WHITESPACE = r" |\r?\n[ \t]{0,16}"
"""Between JSON tokens unless the client says otherwise: a space, or a new line with indentation.
Enough for readable output, too little for a model to get lost in."""

_LEXER_STATES = 50_000
"""Maximum states of one compiled grammar; each takes one or two kilobytes."""
_BUILD_FUEL = 250_000
"""What may be spent on a grammar's lexer, in the library's units: schemas with a thousand
properties fit, but not repetitions of repetitions that would take hundreds of megabytes."""
_STEP_FUEL = 100_000
"""What may be spent on one mask, in the library's units: some ten milliseconds."""
_NICE = 10
_STACK_BYTES = 256 * 1024 * 1024
"""Stack of a thread that analyses grammars; only what is used of it takes memory."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9]")
_QUOTED_LINE = re.compile(r"[ ^~]*$| *\d+ \||<non-verbose/>")
_NOTHING_FITS = "no text fits the grammar"
_INLINE_SCHEMA = re.compile(r"%json\s*(?=\{)")
_LARK_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*')
_LARK_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*[^\n:]{0,200}:", re.MULTILINE)
_JSON = json.JSONDecoder()
_LARK_LINE = re.compile(r"\s*(%llguidance\b|start\s*:(?!:=))")


class BadGrammar(ValueError):
    """The grammar cannot be enforced; the message says why."""


def grammar_size(spec: GrammarSpec) -> int:
    """Return the characters of a grammar's texts."""
    match spec:
        case JsonSchemaGrammar(schema, whitespace):
            return len(schema) + len(whitespace or "")
        case JsonObjectGrammar(whitespace):
            return len(whitespace or "")
        case RegexGrammar(pattern):
            return len(pattern)
        case ChoiceGrammar(choices):
            return sum(map(len, choices)) + len(choices)
        case LarkGrammar(text):
            return len(text)


def grammar_text(spec: GrammarSpec) -> str:
    """Return the grammar in the form that llguidance reads.

    Raises:
        BadGrammar: it is too large, or its parts do not have the right form.
    """
    from llguidance import LLMatcher

    if grammar_size(spec) > MAX_GRAMMAR_SIZE:
        raise BadGrammar(f"the grammar is longer than {MAX_GRAMMAR_SIZE} characters")
    match spec:
        case JsonSchemaGrammar(schema, whitespace, lenient):
            return _json_grammar(schema, whitespace, lenient=lenient)
        case JsonObjectGrammar(whitespace):
            return _json_grammar('{"type": "object"}', whitespace, lenient=False)
        case RegexGrammar(pattern):
            return _regex_grammar(pattern)
        case ChoiceGrammar(choices):
            if not choices or not all(choices):
                raise BadGrammar("there must be at least one choice, and none may be empty")
            return _regex_grammar("|".join(map(_literal, choices)))
        case LarkGrammar(text):
            _check_rules(text)
            return LLMatcher.grammar_from_lark(_with_schemas(text))


def _regex_grammar(pattern: str) -> str:
    from llguidance import regex_to_lark

    if not pattern:
        raise BadGrammar("the expression is empty")
    # Digits and letters of \d and \w are those of ASCII, as in JSON schemas.
    return f"start: /{regex_to_lark(pattern, use_ascii='dw')}/"


def _json_grammar(schema: str, whitespace: str | None, *, lenient: bool) -> str:
    from llguidance import LLMatcher

    options: dict[str, Any] = {"whitespace_flexible": whitespace != ""}
    if whitespace != "":
        options["whitespace_pattern"] = SOME_WHITESPACE if whitespace is None else whitespace
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    return LLMatcher.grammar_from_json_schema(
        _prepared_schema(schema, lenient=lenient),
        overrides=options,  # type: ignore[arg-type]
    )


def _prepared_schema(text: str, *, lenient: bool) -> str:
    """Return the schema as it is compiled, in the form of an object: `true` is a schema too."""
    try:
        decoded = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the schema is not valid JSON: {error}") from error
    if decoded is True:
        return "{}"
    if not isinstance(decoded, dict):
        raise BadGrammar("a schema must be a JSON object, or true")
    schema = _prepared(decoded, lenient=lenient)
    return text if schema is decoded else json.dumps(schema)


def _prepared(decoded: Any, *, lenient: bool) -> Any:
    try:
        return grammar_schema.prepared(decoded, _matches_only, lenient=lenient)
    except grammar_schema.BadSchema as error:
        raise BadGrammar(str(error)) from error


def _matches_only(pattern: str, names: list[str]) -> bool:
    """Whether a pattern, searched for in keys, is found in no others than these."""
    from llguidance import LLMatcher, regex_to_lark

    bare = pattern.removeprefix("^").removesuffix("$")
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    after = "" if pattern.endswith("$") else r"(.|\n)*"
    try:
        found = regex_to_lark(f"{before}({bare}){after}", use_ascii="dw")
    except ValueError:
        return False  # whatever is wrong with it, the library will say
    others = "|".join(map(_literal, filter(None, names)))
    lark = f"start: KEY\nKEY: /{found}/ & ~/({others})?/"
    return grammar_error(new_matcher(_byte_tokenizer(()), LLMatcher.grammar_from_lark(lark))) == (
        _NOTHING_FITS
    )


def _with_schemas(lark: str) -> str:
    """Return a grammar with the schemas within it as they are compiled."""
    parts, position = [], 0
    multiples: list[Any] = []
    for found in _INLINE_SCHEMA.finditer(lark):
        if found.end() < position:
            continue  # in a schema
        try:
            decoded, end = _JSON.raw_decode(lark, found.end())
        except ValueError:
            continue  # no schema, or one that the library refuses
        except RecursionError as error:
            raise BadGrammar("the grammar is nested too deeply") from error
        multiples.append(decoded)
        options = decoded.get("x-guidance")
        lenient = isinstance(options, dict) and options.get("lenient") is True
        schema = _prepared(decoded, lenient=lenient)
        if schema is not decoded:
            parts += [lark[position : found.end()], json.dumps(schema)]
            position = end
    _prepared(multiples, lenient=True)  # all of them together
    return "".join([*parts, lark[position:]])


def _check_rules(lark: str) -> None:
    """Bound what the library follows by recursion: rules, and groups within them."""
    bare = _LARK_TEXT.sub('""', lark)
    rules = len(_LARK_RULE.findall(bare))
    if rules > MAX_RULES:
        raise BadGrammar(f"the grammar has {rules} rules, more than {MAX_RULES}")
    if rules + bare.count("(") > MAX_GROUPS:
        raise BadGrammar(
            f"the grammar is too deeply nested: more than {MAX_GROUPS} rules and groups"
        )


def _literal(text: str) -> str:
    """Return a regular expression that matches this text only."""
    return _NOT_PLAIN.sub(lambda found: f"\\x{{{ord(found.group()):x}}}", text)


def check_grammar(spec: GrammarSpec, special_tokens: tuple[str, ...] = ()) -> str | None:
    """Return why a grammar cannot be enforced, or None when it can.

    Instead of the model's tokenizer one of single bytes and the model's special tokens is used.
    Takes from microseconds to seconds.
    """
    try:
        text = grammar_text(spec)
    except ValueError as error:  # of the library, too
        return told_briefly(str(error))
    except RecursionError:
        return "the grammar is nested too deeply"
    return grammar_error(new_matcher(_byte_tokenizer(special_tokens), text))


def new_matcher(tokenizer: "LLTokenizer", text: str) -> "LLMatcher":
    """Return a matcher at the beginning of a grammar; `grammar_error` says if it is one.

    Copies of a matcher share what they find out about the grammar, and there is a limit to it.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_BUILD_FUEL,
        max_lexer_states=_LEXER_STATES,
        step_lexer_fuel=_STEP_FUEL,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


def grammar_error(matcher: "LLMatcher") -> str | None:
    """Return why no text fits the grammar of a new matcher, or None.

    The first mask, which takes longest, is known afterwards.
    """
    begun = matcher.deep_copy()
    begun.compute_bitmask()
    if not begun.is_error() and len(begun.compute_ff_bytes()) > MAX_GRAMMAR_SIZE:
        return f"the grammar leaves no choice for more than {MAX_GRAMMAR_SIZE} characters"
    return told_briefly(begun.get_error()) if begun.is_error() else None


class _Bytes:
    """A vocabulary of single bytes and special tokens, the first of which ends texts."""

    def __init__(self, special_tokens: tuple[str, ...]) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        specials = [token.encode() for token in ("<|end|>", *special_tokens)]
        self.tokens = [bytes([value]) for value in range(256)] + specials
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.lru_cache(maxsize=4)
def _byte_tokenizer(special_tokens: tuple[str, ...]) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Bytes(special_tokens)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=256)


_REPEATED_TWICE = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|[?*+]{2,}')
"""Texts and expressions, which stay as they are, and marks that say twice how often."""


def _repeated_once(match: re.Match[str]) -> str:
    """Return one mark for several: Lark's syntax has no `a??`, which `((a)?)?` becomes."""
    found = match.group()
    if found[0] in "?*+":
        return found[0] if len(set(found)) == 1 else "*"
    return found


def lark_from_ebnf(text: str) -> str:
    """Return a grammar in GBNF (`root ::= ...`) in Lark's syntax; one that is Lark as it is.

    Raises:
        BadGrammar: it is neither.
    """
    if any(_LARK_LINE.match(line) for line in text.splitlines()):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MAX_GBNF_SIZE:
        raise BadGrammar(f"the grammar is longer than {MAX_GBNF_SIZE} characters, in GBNF")
    try:
        return _REPEATED_TWICE.sub(_repeated_once, gbnf_to_lark(text))
    except RecursionError as error:
        raise BadGrammar("the grammar is nested too deeply") from error
    except Exception as error:  # the library raises nothing more specific
        raise BadGrammar(f"neither Lark (start: ...) nor GBNF (root ::= ...): {error}") from error


def leads_nowhere(message: str) -> bool:
    """Whether one of the library's messages says that nothing fits the grammar any more."""
    return "NoExtension" in message


def told_briefly(message: str) -> str:
    """Return one of the library's messages, which may quote whole grammars, on a short line."""
    if leads_nowhere(message):
        return _NOTHING_FITS
    lines = [line.strip() for line in message.splitlines() if not _QUOTED_LINE.match(line)]
    short = [line if len(line) <= 120 else line[:120] + "..." for line in lines]
    return " ".join(short)[:500]


class GrammarThreads:
    """Threads in which grammars are analysed; none is started before its first use."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(
            count, thread_name_prefix=name, initializer=_let_others_go_first
        )

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call the function as soon as one is free."""
        with _stack_size:  # can be set for all new threads of the process only
            before = threading.stack_size(_STACK_BYTES)
            try:
                return self._pool.submit(function, *args, **kwargs)
            finally:
                threading.stack_size(before)

    def shutdown(self) -> None:
        """Drop what has not begun; what has begun ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _let_others_go_first() -> None:
    """Give this thread a lower priority than the others of its process."""
    with contextlib.suppress(OSError):  # a thread is a process to Linux; elsewhere it is not
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


_stack_size = threading.Lock()
