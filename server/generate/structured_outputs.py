"""Conversion of a request's output constraints to a grammar."""

import json
from typing import Any

import msgspec

from engine.shared.grammar_schema import closed
from engine.shared.grammar_spec import grammar_size
from engine.shared.messages import (
    ChoiceGrammar,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    RegexGrammar,
)
from server.errors import invalid_field, too_complex
from server.generate.grammar_process import GrammarText
from server.generate.structural_tags import StructuralTag
from server.json_price import TooCostly, check_price
from server.schema.fields import SamplingFields
from server.schema.structured import ResponseFormat, StructuredOutputs

MAX_COPIES_SIZE = 16 * 2**20
"""Maximum characters of a grammar times the sequences that it is sent with."""


def check_copies(spec: GrammarSpec, sequences: int) -> None:
    """Limit the total size of a grammar's copies, one for each of a request's sequences.

    Raises:
        ApiError: the total is too large.
    """
    size = grammar_size(spec) * sequences
    if size > MAX_COPIES_SIZE:
        raise invalid_field(
            "prompt",
            f"a grammar of {grammar_size(spec)} characters is too long for {sequences} "
            "sequences (prompts times choices)",
        )


RequestedGrammar = tuple[GrammarSpec | GrammarText | StructuralTag, str]
"""A grammar, and the field it came from."""


def requested_grammar(
    request: SamplingFields, *, closes_objects: bool = False
) -> RequestedGrammar | None:
    """Return the unchecked grammar that constrains a request's output, and its field.

    With `closes_objects`, schema objects allow only the properties that they list.

    Raises:
        ApiError: the request has more than one constraint.
    """
    form, constraints = request.response_format, request.structured_outputs
    found = None if form is None else _of_response_format(form, closes_objects)
    if constraints is None:
        return found
    if found is not None:
        raise invalid_field(
            "structured_outputs", "cannot be combined with a response_format other than text"
        )
    return _of_constraints(constraints, closes_objects)


def _of_response_format(form: ResponseFormat, closes_objects: bool) -> RequestedGrammar | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return JsonObjectGrammar(), "response_format"
        case "json_schema":
            json_schema = form.json_schema
            if json_schema is None:
                field = "response_format.json_schema"
                raise invalid_field(field, "is needed for type 'json_schema'")
            lenient = json_schema.strict is False
            schema = closed(json_schema.schema_) if closes_objects else json_schema.schema_
            spec = JsonSchemaGrammar(_json_text(schema), lenient=lenient)
            return spec, "response_format.json_schema.schema"
        case "structural_tag":
            sent = form.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
            return StructuralTag(sent), "response_format"


def _of_constraints(constraints: StructuredOutputs, closes_objects: bool) -> RequestedGrammar:
    given = [name for name in _KINDS if getattr(constraints, name) not in (None, False)]
    if len(given) != 1:
        raise invalid_field(
            "structured_outputs",
            "exactly one of json, json_object, regex, choice, grammar and "
            f"structural_tag is needed, but there are {len(given)}",
        )
    whitespace = "" if constraints.disable_any_whitespace else constraints.whitespace_pattern
    param = f"structured_outputs.{_KINDS[given[0]]}"
    if constraints.json_schema is not None:
        schema = constraints.json_schema
        text = _checked(schema, param) if isinstance(schema, str) else _json_text(schema)
        if constraints.disable_additional_properties or closes_objects:
            text = _json_text(closed(_decoded(text, param)))
        return JsonSchemaGrammar(text, whitespace), param
    if constraints.structural_tag is not None:
        tag = constraints.structural_tag
        if isinstance(tag, str):
            tag = _decoded(_checked(tag, param), param)
        if not isinstance(tag, dict):
            raise invalid_field(param, "must be a JSON object")
        return StructuralTag(tag, whitespace), param
    if constraints.regex is not None:
        return RegexGrammar(constraints.regex), param
    if constraints.choice is not None:
        return ChoiceGrammar(tuple(constraints.choice)), param
    if constraints.grammar is not None:
        return GrammarText(constraints.grammar), param
    return JsonObjectGrammar(whitespace), param


_KINDS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Field name shown to clients, by attribute."""


def _checked(text: str, param: str) -> str:
    """Check the cost of JSON sent as a string, which the body's check did not cover."""
    try:
        check_price(text.encode("utf-8", "replace"))
    except TooCostly as error:
        raise too_complex(error, param) from error
    return text


def _decoded(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise invalid_field(param, f"not valid JSON: {error}") from error


def _json_text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)
