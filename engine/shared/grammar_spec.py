"""Limits on request grammars, and their conversion for llguidance.

Front ends check a grammar here before anything is queued, and engines compile it from the same
form. Both must do so in a thread of `GrammarThreads`: clients' grammars can take a while to
analyse, and nest deeper than an ordinary thread's stack allows.
"""

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import msgspec

from engine.shared import grammar_schema
from engine.shared.matchers import (
    MAX_GRAMMAR_SIZE,
    byte_tokenizer,
    grammar_error,
    literal,
    new_matcher,
    shortened_message,
)
from engine.shared.messages import (
    ChoiceGrammar,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)

P = ParamSpec("P")
T = TypeVar("T")

MAX_GBNF_SIZE = 32 * 1024
"""Maximum characters of a grammar in GBNF, whose conversion time grows quickly."""
MAX_RULES = 5000
"""Maximum rules of a grammar in Lark or GBNF, which also bounds the depth of a chain of rules:
each takes up to 6 KB of the library's stack."""
MAX_GROUPS = 10_000
"""Maximum rules plus parentheses; the library's time grows with the square."""
MAX_MARKER_SIZE = 1024
"""Maximum characters of the text after which a grammar applies."""

SOME_WHITESPACE = r" |\r?\n[ \t]{0,16}"
"""Default whitespace between JSON tokens: a space, or a new line with indentation.
Enough for readable output, too little for a model to loop on."""

_NICE = 10
_STACK_BYTES = 256 * 1024 * 1024
"""Stack of a thread that analyses grammars; only the touched part takes memory."""

# These match client-supplied text, so repetitions are possessive: there is no backtracking, and
# an unclosed quote ends with its line.
_LARK_PART = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"?|/(?![/*])(?:[^/\\\n]|\\.)++/?|//[^\n]*+|(?P<schema>%json\s*+)(?=\{)'
)
"""Strings, expressions and comments of a grammar, and `%json` in front of a schema."""
_LARK_RULE = re.compile(r"^[ \t]*+[?!]?[A-Za-z_][\w-]*+[^\n:]{0,200}+:", re.MULTILINE)
_JSON = json.JSONDecoder()
_LARK_LINE = re.compile(r"\s*(%llguidance\b|start\s*:(?!:=))")


class BadGrammar(ValueError):
    """The grammar cannot be enforced; the message says why."""


def grammar_size(spec: GrammarSpec) -> int:
    """Return the total characters of a grammar's texts."""
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
    """Return the grammar in llguidance's format.

    Raises:
        BadGrammar: it is too large or malformed.
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
            return _regex_grammar("|".join(map(literal, choices)))
        case LarkGrammar(text):
            return LLMatcher.grammar_from_lark(_checked_lark(text))


def _regex_grammar(pattern: str) -> str:
    from llguidance import regex_to_lark

    if not pattern:
        raise BadGrammar("the expression is empty")
    # \d and \w match ASCII only, as in JSON schemas.
    return f"start: /{regex_to_lark(pattern, use_ascii='dw')}/"


def _json_grammar(schema: str, whitespace: str | None, *, lenient: bool) -> str:
    from llguidance import LLMatcher

    options: dict[str, Any] = {"whitespace_flexible": whitespace != ""}
    if whitespace != "":
        options["whitespace_pattern"] = SOME_WHITESPACE if whitespace is None else whitespace
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    try:
        decoded = msgspec.json.decode(schema)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the schema is not valid JSON: {error}") from error
    if decoded is True:
        decoded, schema = {}, "{}"
    if not isinstance(decoded, dict):
        raise BadGrammar("a schema must be a JSON object, or true")
    prepared = _prepared(decoded, lenient=lenient)
    return LLMatcher.grammar_from_json_schema(
        schema if prepared == decoded else json.dumps(prepared),
        overrides=options,  # type: ignore[arg-type]
    )


def _prepared(decoded: Any, *, lenient: bool) -> Any:
    try:
        return grammar_schema.prepared(decoded, lenient=lenient)
    except grammar_schema.BadSchema as error:
        raise BadGrammar(str(error)) from error


def _checked_lark(lark: str) -> str:
    """Return a Lark grammar with its embedded schemas prepared for compilation.

    Raises:
        BadGrammar: a schema is invalid, or there are too many rules for the library's recursion.
    """
    written, bare = [], []
    schemas: list[Any] = []
    position = 0
    while (found := _LARK_PART.search(lark, position)) is not None:
        bare.append(lark[position : found.start()])
        end = found.end()
        if found["schema"] is None:
            written.append(lark[position:end])
        else:
            try:
                decoded, end = _JSON.raw_decode(lark, end)
            except ValueError as error:
                raise BadGrammar(f"the schema after %json is not valid JSON: {error}") from error
            except RecursionError as error:
                raise BadGrammar("the grammar is nested too deeply") from error
            schemas.append(decoded)
            options = decoded.get("x-guidance")
            lenient = isinstance(options, dict) and options.get("lenient") is True
            schema = _prepared(decoded, lenient=lenient)
            text = lark[found.end() : end] if schema == decoded else json.dumps(schema)
            written += [lark[position : found.end()], text]
        position = end
    written.append(lark[position:])
    bare.append(lark[position:])
    _prepared(schemas, lenient=True)  # checks the limits over all schemas together
    without_texts = '""'.join(bare)
    rules = len(_LARK_RULE.findall(without_texts))
    if rules > MAX_RULES:
        raise BadGrammar(f"the grammar has {rules} rules, more than {MAX_RULES}")
    if rules + without_texts.count("(") > MAX_GROUPS:
        raise BadGrammar(
            f"the grammar is too deeply nested: more than {MAX_GROUPS} rules and groups"
        )
    return "".join(written)


def check_grammar(spec: GrammarSpec, special_tokens: tuple[str, ...] = ()) -> str | None:
    """Return why a grammar cannot be enforced, None if it can.

    Uses a byte tokenizer with the model's special tokens instead of the model's tokenizer. Takes
    from microseconds to seconds.
    """
    try:
        text = grammar_text(spec)
    except ValueError as error:  # the library raises it too
        return shortened_message(str(error))
    except RecursionError:
        return "the grammar is nested too deeply"
    return grammar_error(new_matcher(byte_tokenizer(special_tokens), text))


_REPEATED_TWICE = re.compile(r'"(?:\\.|[^"\\])*+"?|/(?:\\.|[^/\\])*+/?|[?*+]{2,}+')
"""Strings and expressions, which are kept, and consecutive repetition marks."""


def _repeated_once(match: re.Match[str]) -> str:
    """Merge repetition marks: Lark has no `a??`, which `((a)?)?` becomes."""
    found = match.group()
    if found[0] in "?*+":
        return found[0] if len(set(found)) == 1 else "*"
    return found


def lark_from_ebnf(text: str) -> str:
    """Convert a GBNF grammar (`root ::= ...`) to Lark; Lark is returned unchanged.

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


class GrammarThreads:
    """Threads that analyse grammars, started on first use."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_lower_priority)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call and return its future."""
        with _stack_size:  # the stack size is a process-wide setting for new threads
            before = threading.stack_size(_STACK_BYTES)
            try:
                return self._pool.submit(function, *args, **kwargs)
            finally:
                threading.stack_size(before)

    def shutdown(self) -> None:
        """Cancel queued calls; running ones finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # per-thread priorities are specific to Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


_stack_size = threading.Lock()
