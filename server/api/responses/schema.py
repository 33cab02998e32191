"""POST /v1/responses: the request."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from server.access.limits import (
    INT64_MAX,
    INT64_MIN,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_REPETITION_PENALTY,
    MAX_TOKENS,
    MAX_TOOLS,
    MIN_REPETITION_PENALTY,
)
from server.api.shared.body import JsonObject, Name, RequestBody, part_type
from server.api.shared.fields import (
    CacheSalt,
    LogitBias,
    NamedTokenIds,
    ReasoningEffort,
    StopStrings,
    Verbosity,
)
from server.api.shared.structured import StructuredOutputs


class ContentPart(RequestBody):
    """A piece of a message; only text is served."""

    type: Literal["input_text", "output_text", "text"]
    text: str


ContentParts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS)]


class RefusalContent(RequestBody):
    """A piece of an assistant's message that said no."""

    type: Literal["refusal"]
    refusal: str


MessageContent = Annotated[
    Annotated[ContentPart, Tag("a text")] | Annotated[RefusalContent, Tag("a refusal")],
    Discriminator(part_type),
]


class MessageItem(RequestBody):
    """A turn of the conversation; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[MessageContent], Field(max_length=MAX_PARTS)]


class FunctionCallItem(RequestBody):
    """A call that the model made before."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class FunctionCallOutputItem(RequestBody):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | ContentParts


class CustomToolCallItem(RequestBody):
    """A call of a tool whose input is a text, that the model made before."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str


class CustomToolCallOutputItem(RequestBody):
    """What came of such a call."""

    type: Literal["custom_tool_call_output"]
    call_id: Name
    output: str | ContentParts


class ReasoningPart(RequestBody):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)]


class ReasoningItem(RequestBody):
    """What the model thought before; only its `content` reaches the template."""

    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = None


class ItemReference(RequestBody):
    """An item of the output of a response that was kept."""

    type: Literal["item_reference"]
    id: Name


def _item_type(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_type),
]


CUSTOM_INPUT = "input"
"""The parameter of the functions that stand for custom tools."""


class CustomToolFormat(RequestBody):
    """What the input of a custom tool looks like: any text, or one that matches an expression."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponseTool(RequestBody):
    """A function that the model may call, or a tool of the client that takes a text.

    Tools that a server would run are refused.
    """

    type: Name
    name: Name | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    format: CustomToolFormat | None = Field(None, description="For type custom.")


class ChosenTool(RequestBody):
    """A function, or a custom tool, by its name."""

    type: Literal["function", "custom"]
    name: Name


class AllowedToolsChoice(RequestBody):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(RequestBody):
    """Shape of the answer's text: `text`, `json_object`, or `json_schema` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestBody):
    """How the answer's text looks."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(
        None, description="Passed to the chat template under this name; few take notice."
    )


class ReasoningOptions(RequestBody):
    """How the model reasons."""

    effort: ReasoningEffort | None = Field(
        None, description="Passed to the chat template as reasoning_effort."
    )
    summary: Name | None = Field(None, description="Accepted and not used: nothing is summarized.")


class ResponseStreamOptions(RequestBody):
    """Accepted and not used."""

    include_obfuscation: bool | None = None


class ConversationName(RequestBody):
    """A kept conversation by its name."""

    id: Name


# More than 15 attributes: the fields are OpenAI's.
class ResponsesRequest(RequestBody):
    """Answer a list of items with more items."""

    model: str | None = Field(None, description="One of the served names; default: the first.")
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(None, description="What a system message says.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy. Default: the model's, else 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Default: the model's, else 1.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Default: all that fits."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOKENS)
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Accepted: it is about hosted tools."
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = Field(
        None, description="false: what the model thinks is generated, and left out of the response."
    )
    metadata: dict[str, str] | None = Field(None, description="Comes back in the response.")
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Name], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="message.output_text.logprobs is served, the rest has nothing to add."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        "disabled", description="auto: earlier turns that do not fit are left out."
    )
    store: bool | None = Field(
        None, description="Whether the response is kept. Default: if the server keeps any."
    )
    previous_response_id: Name | None = Field(
        None, description="A kept response, whose conversation this one goes on with."
    )
    conversation: Name | ConversationName | None = Field(
        None, description="A kept conversation, which this one goes on with and adds to."
    )
    background: bool | None = Field(
        False, description="Answer at once; the response is kept when it is complete."
    )
    prompt: JsonObject | None = Field(None, description="Refused: there are no stored prompts.")
    user: Name | None = Field(None, description="Comes back in the response.")
    safety_identifier: Name | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: Name | None = Field(None, description="Accepted and not used.")
    service_tier: Name | None = Field(None, description="Accepted and not used.")

    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: StopStrings | None = None
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    top_k: int | None = Field(0, ge=-1, lt=2**31, description="0 and -1 mean all tokens.")
    min_p: float | None = Field(0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(
        1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY
    )
    min_tokens: int | None = Field(0, ge=0, le=MAX_TOKENS)
    ignore_eos: bool | None = False
    stop_token_ids: NamedTokenIds | None = None
    priority: int | None = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: CacheSalt | None = None
    request_id: str | None = Field(None, min_length=1, max_length=256, pattern=r"^[!-~]+$")
    chat_template_kwargs: JsonObject | None = None
    logit_bias: LogitBias | None = None
    structured_outputs: StructuredOutputs | None = Field(
        None, description="A constraint on the text; not together with a text.format."
    )


PASSED_ON = (
    "temperature", "top_p", "parallel_tool_calls", "user", "seed", "stop",
    "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "priority", "cache_salt", "chat_template_kwargs",
    "logit_bias", "include_reasoning",
)  # fmt: skip
"""Fields that mean the same in a chat completion; a stream too keeps its whole answer."""
