"""POST /v1/responses and /v1/conversations: the requests."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag

from server import limits
from server.schema.body import Count, JsonObject, Name, RequestBody, Tokens, part_type, type_of
from server.schema.fields import DrawingFields, ReasoningEffort, Verbosity
from server.schema.messages import RefusalPart
from server.schema.structured import StructuredOutputs
from server.schema.support import (
    CACHE_HINT,
    LABEL,
    LABELS,
    MEDIA,
    NO_BUDGET,
    NO_KV_TRANSFER,
    NO_MEDIA,
    TOP_LOGPROBS,
    UNSERVED,
    USER,
    Rows,
    different,
    extra,
    ignored,
    refused,
)


class ContentPart(RequestBody):
    """A text part of a message or of a tool call's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MediaPart(RequestBody):
    """An image, for models that take images; other media are refused in messages.

    In outputs of calls, media that the model does not support are replaced by a note.
    """

    type: Literal["input_image", "input_file", "input_audio"]
    image_url: str | None = Field(None, description="A data: URL, or one that is allowed.")
    detail: Name | None = Field(
        None, description="Accepted but not used: the model's processor chooses the size."
    )


MessageContent = Annotated[
    Annotated[ContentPart, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[MediaPart, Tag("media")],
    Discriminator(part_type),
]
CallOutput = str | Annotated[list[MessageContent], Field(max_length=limits.MAX_PARTS)]


CUSTOM_INPUT = "input"
"""Parameter name of the functions that represent custom tools."""


class CustomToolFormat(RequestBody):
    """Format of a custom tool's input: free text, or a grammar or pattern that it must match."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class NamespacedTool(RequestBody):
    """A function that the model can call, or a client tool that takes text.

    Of the other types only `local_shell` and a `tool_search` that the client runs are supported.
    The rest are dropped, or refused if `tool_choice` requires them.
    """

    type: Name
    name: Name | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    format: CustomToolFormat | None = Field(None, description="For type custom.")
    execution: Name | None = Field(None, description="For type tool_search: client or server.")


class ResponseTool(NamespacedTool):
    """A tool, or with type `namespace` several tools that share a name prefix."""

    tools: Annotated[list[NamespacedTool], Field(max_length=limits.MAX_TOOLS)] | None = None


class MessageItem(RequestBody):
    """A turn of the conversation; `type` is optional."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[MessageContent], Field(max_length=limits.MAX_PARTS)]


class FunctionCallItem(RequestBody):
    """A function call that the model made earlier."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: str


class FunctionCallOutputItem(RequestBody):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: CallOutput


class CustomToolCallItem(RequestBody):
    """An earlier call of a tool with plain text input."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    input: str


class CustomToolCallOutputItem(RequestBody):
    """The output of a custom tool call."""

    type: Literal["custom_tool_call_output"]
    call_id: Name
    output: CallOutput


class LocalShellCallItem(RequestBody):
    """A command that the model earlier requested the client to run."""

    type: Literal["local_shell_call"]
    call_id: Name | None = None
    id: Name | None = None
    action: JsonObject


class LocalShellCallOutputItem(RequestBody):
    """The output of such a command."""

    type: Literal["local_shell_call_output"]
    id: Name
    output: str


class ToolSearchCallItem(RequestBody):
    """A tool search that the model earlier requested from the client."""

    type: Literal["tool_search_call"]
    call_id: Name | None = None
    arguments: Any = None


class ToolSearchOutputItem(RequestBody):
    """The tools found: the model can call them from here on."""

    type: Literal["tool_search_output"]
    call_id: Name | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=limits.MAX_TOOLS)]


class AdditionalToolsItem(RequestBody):
    """Tools that the model can call in addition to those of the request."""

    type: Literal["additional_tools"]
    tools: Annotated[list[ResponseTool], Field(max_length=limits.MAX_TOOLS)]


class HostedItem(RequestBody):
    """Accepted but dropped: activity of tools that only other servers offer."""

    type: Literal[
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "program",
        "program_output",
    ]


class CompactionItem(RequestBody):
    """A summary of the conversation so far, as returned by `/v1/responses/compact`."""

    type: Literal["compaction", "compaction_summary", "context_compaction"]
    encrypted_content: str | None = None


class ReasoningPart(RequestBody):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=limits.MAX_PARTS)]


class ReasoningItem(RequestBody):
    """Reasoning of an earlier answer; only its `content` reaches the template."""

    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = None


class ItemReference(RequestBody):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: Name


def _item_type(item: Any) -> str:
    kind = type_of(item) or "message"
    if kind in _HOSTED:
        return "web_search_call"
    return "compaction" if kind in ("compaction_summary", "context_compaction") else kind


_HOSTED = frozenset(get_args(HostedItem.model_fields["type"].annotation))


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[LocalShellCallOutputItem, Tag("local_shell_call_output")]
    | Annotated[ToolSearchCallItem, Tag("tool_search_call")]
    | Annotated[ToolSearchOutputItem, Tag("tool_search_output")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[HostedItem, Tag("web_search_call")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_type),
]


class ChosenTool(RequestBody):
    """A tool by name, or by type if there is only one of that type."""

    type: Name
    name: Name | None = None
    namespace: Name | None = None


class AllowedToolsChoice(RequestBody):
    """A choice restricted to some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=limits.MAX_TOOLS)]


class TextFormat(RequestBody):
    """Format of the answer's text: `text`, `json_object`, or `json_schema` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestBody):
    """Options for the answer's text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(
        None, description="Passed to the chat template under this name; few templates use it."
    )


class ReasoningOptions(RequestBody):
    """Reasoning options."""

    effort: ReasoningEffort | None = Field(
        None, description="Passed to the chat template as reasoning_effort."
    )
    summary: Name | None = Field(None, description="Accepted but not used: nothing is summarized.")


class ResponseStreamOptions(RequestBody):
    """Accepted but ignored."""

    include_obfuscation: bool | None = None


class ConversationName(RequestBody):
    """ID of a stored conversation."""

    id: Name


class ResponsesRequest(DrawingFields):
    """Generate output items for a list of input items."""

    input: str | Annotated[list[InputItem], Field(max_length=limits.MAX_MESSAGES)]
    instructions: str | None = Field(None, description="Text of a system message.")
    max_output_tokens: Tokens | None = Field(None, description="Default: the rest of the context.")
    top_logprobs: Count | None = Field(None, json_schema_extra=TOP_LOGPROBS)
    tools: Annotated[list[ResponseTool], Field(max_length=limits.MAX_TOOLS)] | None = Field(
        None,
        json_schema_extra=different(
            "functions, namespaces, custom, local_shell and tool_search of the client; others "
            "are ignored, or refused if tool_choice requires them"
        ),
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: Count | None = Field(
        None,
        description="Accepted but not used: it limits hosted tools.",
        json_schema_extra=extra("ignored", "it limits tools that a server runs"),
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = Field(
        None, json_schema_extra=different("nothing is summarized")
    )
    include_reasoning: bool | None = Field(
        None, description="false: reasoning is generated but omitted from the response."
    )
    metadata: dict[str, str] | None = Field(None, description="Returned in the response.")
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Name], Field(max_length=limits.MAX_PARTS)] | None = Field(
        None, description="message.output_text.logprobs is served; other values add nothing."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        "disabled",
        description="auto: earlier turns that do not fit are omitted.",
        json_schema_extra=different("auto drops whole turns and keeps system messages"),
    )
    store: bool | None = Field(
        None,
        description="Whether the response is stored. Default: true if the server has a store.",
        json_schema_extra=different("the operator limits how many are stored, and for how long"),
    )
    previous_response_id: Name | None = Field(
        None, description="A stored response whose conversation this one continues."
    )
    conversation: Name | ConversationName | None = Field(
        None, description="A stored conversation that this response continues and is added to."
    )
    background: bool | None = Field(
        False, description="Answer immediately; the response is stored when it is complete."
    )
    prompt: JsonObject | None = Field(
        None,
        description="Refused: there are no stored prompts.",
        json_schema_extra=extra("refused", "there are no stored prompts", example={"id": "pmpt_1"}),
    )
    user: Name | None = Field(None, description="Returned in the response.", json_schema_extra=USER)
    safety_identifier: Name | None = Field(
        None, description="Accepted but not used.", json_schema_extra=extra("ignored", LABEL)
    )
    prompt_cache_key: Name | None = Field(
        None, description="Accepted but not used.", json_schema_extra=extra("ignored", CACHE_HINT)
    )
    service_tier: Name | None = Field(
        None, description="Accepted but not used.", json_schema_extra=extra("ignored", CACHE_HINT)
    )

    chat_template_kwargs: JsonObject | None = None
    structured_outputs: StructuredOutputs | None = Field(
        None, description="A constraint on the text; cannot be combined with text.format."
    )

    undeclared: ClassVar[Rows] = {
        **UNSERVED,
        **NO_KV_TRANSFER,
        **NO_BUDGET,
        **{name: row for name, row in LABELS.items() if name != "metadata"},
        **NO_MEDIA,
        **ignored(MEDIA, "image"),
        **ignored("all requests have the same access", "access_programs"),
        **ignored("responses are generated as soon as possible", "background_options"),
        **refused(
            "use /v1/completions or /v1/chat/completions",
            "use_beam_search early_stopping", False,
        ),
        **refused(
            "use /v1/completions or /v1/chat/completions", "length_penalty", 1, 0
        ),
        **refused("not supported; use instructions", "personality"),
        **refused("input is not shortened", "context_management"),
        **refused("nothing is moderated", "moderation"),
        **refused("send the whole conversation as input",
                  "previous_input_messages previous_response"),
        **refused("the messages behind a response are not shown",
                  "enable_response_messages", False),
        **refused("use text.format", "response_format"),
        **refused("use max_output_tokens", "max_tokens max_completion_tokens"),
        **refused("use reasoning.effort", "reasoning_effort"),
        **refused("use input", "messages"),
        **refused("use include", "logprobs", False),
        **refused("a response has one answer", "n best_of", 1),
        **refused("not served here; /v1/chat/completions has it",
                  "allowed_token_ids bad_words prompt_logprobs truncate_prompt_tokens "
                  "logprob_token_ids"),
        **refused("not served here; /v1/chat/completions has it",
                  "include_stop_str_in_output", False),
        **refused("not served here; /v1/chat/completions has it", "skip_special_tokens", True),
        **refused("/v1/chat/completions has it", "chat_template"),
    }  # fmt: skip


_NOT_PASSED_ON = ("model", "request_id", "structured_outputs")
COPIED_FIELDS = (
    *(name for name in DrawingFields.model_fields if name not in _NOT_PASSED_ON),
    "parallel_tool_calls", "user", "chat_template_kwargs", "include_reasoning",
)  # fmt: skip
"""Fields with the same meaning in chat completions; streams also keep the complete answer."""


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=limits.MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=limits.MAX_METADATA_VALUE)],
    ],
    Field(max_length=limits.MAX_METADATA),
]


class ConversationRequest(RequestBody):
    """Create a conversation."""

    items: Annotated[list[InputItem], Field(max_length=limits.MAX_ADDED_ITEMS)] | None = None
    metadata: Metadata | None = None


class MetadataRequest(RequestBody):
    """Change the metadata of a conversation."""

    metadata: Metadata


class ItemsRequest(RequestBody):
    """Add items to a conversation."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=limits.MAX_ADDED_ITEMS)]
