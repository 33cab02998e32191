"""Fields of requests that say what form the output has."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from server.schema.body import JsonObject, RequestBody


class JsonSchemaFormat(RequestBody):
    """A schema that the answer has to fit."""

    name: str = Field(min_length=1, max_length=64, description="Not used.")
    description: str | None = Field(None, description="Not used.")
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = Field(
        None,
        description="The schema is always enforced; false: but for keywords that cannot be, which "
        "are refused otherwise.",
    )


class ResponseFormat(RequestBody):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="For type json_schema.")
    format: JsonObject | None = Field(
        None, description="For type structural_tag: what the answer is composed of."
    )
    structures: list[JsonObject] | None = Field(
        None, description="For type structural_tag, instead: begin, schema and end of parts."
    )
    triggers: list[str] | None = Field(
        None, description="With structures: the texts that the parts begin with."
    )


class StructuredOutputs(RequestBody):
    """A constraint on the output: exactly one of json, json_object, regex, choice, grammar and
    structural_tag."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    json_schema: JsonObject | str | None = Field(
        None, alias="json", description="A JSON schema, as an object or as its text."
    )
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="What the whole output matches.")
    choice: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="The output is one of these."
    )
    grammar: str | None = Field(
        None, description="A context-free grammar, in Lark's syntax or in GBNF."
    )
    structural_tag: JsonObject | str | None = Field(
        None, description="Forms of parts of the output, as an object or as its text."
    )
    disable_additional_properties: bool = Field(
        False, description="For JSON: objects have only the properties that their schema lists."
    )
    disable_any_whitespace: bool = Field(
        False, description="For JSON: nothing between tokens instead of a little whitespace."
    )
    whitespace_pattern: str | None = Field(
        None, description="For JSON: what may stand between tokens, as a regular expression."
    )
