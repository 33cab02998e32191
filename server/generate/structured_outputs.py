"""From what a request says about the form of its output to a grammar that has been checked."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from engine.shared.grammar_spec import (
    BadGrammar,
    GrammarThreads,
    check_grammar,
    grammar_size,
    lark_from_ebnf,
)
from engine.shared.messages import (
    ChoiceGrammar,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)
from server.api.shared.fields import SamplingFields
from server.api.shared.structured import ResponseFormat, StructuredOutputs
from server.http.errors import invalid, too_complex
from server.http.json_price import TooCostly, price

CHECK_THREADS = 2
MAX_COPIES_SIZE = 16 * 2**20
"""Characters of a grammar times the sequences that it is sent with."""
MAX_REMEMBERED = 4096
"""Grammars whose check is not repeated; only their digests are kept."""


class GrammarCheck:
    """Checks grammars beside the event loop, and remembers what it found."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are the texts of tokens that Lark grammars may name as `<...>`."""
        self._special_tokens = tuple(special_tokens)
        self._threads = GrammarThreads(CHECK_THREADS, "grammar check")
        self._found: OrderedDict[bytes, str | None] = OrderedDict()

    async def require(self, spec: GrammarSpec, param: str) -> None:
        """Check that engines can enforce a grammar.

        Raises:
            ApiError: they cannot; `param` is the field that it came from.
        """
        digest = blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()
        if digest in self._found:
            self._found.move_to_end(digest)
        else:
            check = self._threads.submit(check_grammar, spec, self._special_tokens)
            self._found[digest] = await asyncio.wrap_future(check)
            if len(self._found) > MAX_REMEMBERED:
                self._found.popitem(last=False)
        reason = self._found[digest]
        if reason is not None:
            raise invalid(f"{param}: {reason}", param)

    async def lark(self, text: str, param: str) -> LarkGrammar:
        """Return a grammar that is written in Lark's syntax, or in GBNF.

        Raises:
            ApiError: it is in neither; `param` is the field that it came from.
        """
        try:
            converted = self._threads.submit(lark_from_ebnf, text)
            return LarkGrammar(await asyncio.wrap_future(converted))
        except BadGrammar as error:
            raise invalid(f"{param}: {error}", param) from error


def check_copies(spec: GrammarSpec, sequences: int) -> None:
    """Check that a grammar may be sent with each of so many sequences.

    Raises:
        ApiError: all of it together is too much.
    """
    size = grammar_size(spec) * sequences
    if size > MAX_COPIES_SIZE:
        raise invalid(
            f"prompt: a grammar of {grammar_size(spec)} characters is too long for {sequences} "
            "sequences (prompts times choices)",
            "prompt",
        )


async def requested_grammar(request: SamplingFields, check: GrammarCheck) -> GrammarSpec | None:
    """Return the grammar that a request's output has to follow, or None.

    Raises:
        ApiError: it asks for more than one, or for one that cannot be enforced.
    """
    form, constraints = request.response_format, request.structured_outputs
    found = None if form is None else _of_response_format(form)
    if constraints is not None:
        if found is not None:
            raise invalid(
                "structured_outputs: cannot be combined with a response_format other than text",
                "structured_outputs",
            )
        found = await _of_constraints(constraints, check)
    if found is None:
        return None
    spec, param = found
    await check.require(spec, param)
    return spec


def _of_response_format(form: ResponseFormat) -> tuple[GrammarSpec, str] | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return JsonObjectGrammar(), "response_format"
        case "json_schema":
            wanted = form.json_schema
            if wanted is None:
                field = "response_format.json_schema"
                raise invalid(f"{field}: is needed for type 'json_schema'", field)
            lenient = wanted.strict is False
            spec = JsonSchemaGrammar(_json_text(wanted.schema_), lenient=lenient)
            return spec, "response_format.json_schema.schema"


async def _of_constraints(
    wanted: StructuredOutputs, check: GrammarCheck
) -> tuple[GrammarSpec, str]:
    given = [name for name in _KINDS if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        raise invalid(
            "structured_outputs: exactly one of json, json_object, regex, choice and grammar is "
            f"needed, but there are {len(given)}",
            "structured_outputs",
        )
    whitespace = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    param = f"structured_outputs.{_KINDS[given[0]]}"
    if wanted.json_schema is not None:
        schema = wanted.json_schema
        text = _checked(schema, param) if isinstance(schema, str) else _json_text(schema)
        return JsonSchemaGrammar(text, whitespace), param
    if wanted.regex is not None:
        return RegexGrammar(wanted.regex), param
    if wanted.choice is not None:
        return ChoiceGrammar(tuple(wanted.choice)), param
    if wanted.grammar is not None:
        return await check.lark(wanted.grammar, param), param
    return JsonObjectGrammar(whitespace), param


_KINDS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Attribute to the name that clients write."""


def _checked(text: str, param: str) -> str:
    """Return JSON that was sent as a text: its price was not in that of the body."""
    try:
        price(text.encode("utf-8", "replace")).check()
    except TooCostly as error:
        raise too_complex(error, param) from error
    return text


def _json_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)
