"""What requests and responses of several endpoints have in common.

Requests are pydantic models, validated once from the raw body; responses are msgspec Structs,
encoded straight to JSON. Fields that a model does not know are ignored, as OpenAI clients expect
of a server that is older than they are.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from server import limits
from server.schema.body import Alternatives, Count, RequestBody
from server.schema.kv_transfer import KvTransferParams
from server.schema.structured import ResponseFormat, StructuredOutputs
from server.schema.support import (
    LABELS,
    NO_MEDIA,
    PRIORITY,
    UNSERVED,
    USER,
    Rows,
    different,
    ignored,
)

TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
NamedTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=limits.MAX_NAMED_TOKENS)]
StopString = Annotated[str, Field(max_length=limits.MAX_STOP_LENGTH)]
StopStrings = (
    StopString
    | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True)]
)
BadWord = Annotated[str, Field(max_length=limits.MAX_BAD_WORD_LENGTH)]

LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=limits.MAX_NAMED_TOKENS)
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
CacheSalt = Annotated[str, Field(min_length=1, max_length=limits.MAX_CACHE_SALT)]


class StreamOptions(RequestBody):
    """What a stream carries besides the tokens."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = Field(
        False, description="With include_usage: each chunk tells the tokens of its choice so far."
    )


class DrawingFields(RequestBody):
    """Fields shared by completions, chat completions and responses; null means the default."""

    model: str | None = Field(None, description="One of the served names; default: the first.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy. Default: the model's, else 1."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Default: the model's, else 1, which keeps all tokens."
    )
    stop: StopStrings | None = Field(
        None,
        description=f"One string or up to {limits.MAX_STOP_STRINGS}, of {limits.MAX_STOP_LENGTH} "
        "characters.",
    )
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(
        None, description="Token id, as a string, to what is added to its logit."
    )
    seed: int | None = Field(
        None,
        ge=limits.INT64_MIN,
        le=limits.INT64_MAX,
        description="Makes draws repeatable; choice i uses seed + i. Default: random.",
    )
    top_k: int | None = Field(
        None, ge=-1, lt=2**31, description="0 and -1 mean all tokens. Default: the model's, else 0."
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Default: the model's, else 0.")
    repetition_penalty: float | None = Field(
        None,
        ge=limits.MIN_REPETITION_PENALTY,
        le=limits.MAX_REPETITION_PENALTY,
        description="Default: the model's, else 1, which changes nothing.",
    )
    min_tokens: Count | None = 0
    ignore_eos: bool | None = False
    stop_token_ids: NamedTokenIds | None = None
    priority: int | None = Field(
        0,
        ge=-(2**31),
        lt=2**31,
        description="Lower runs first, where the engine has priorities.",
        json_schema_extra=PRIORITY,
    )
    cache_salt: CacheSalt | None = Field(
        None, description="Cached prompts are shared only with requests of the same salt."
    )
    request_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        pattern=r"^[!-~]+$",
        description="The client's name for the request; default: header X-Request-Id, or random.",
    )
    structured_outputs: StructuredOutputs | None = None


class SamplingFields(DrawingFields):
    """Fields shared by completions and chat completions; null always means the default."""

    n: int | None = Field(1, ge=1, le=limits.MAX_CHOICES, description="Choices per prompt.")
    use_beam_search: bool | None = Field(
        False,
        description="Search with as many beams as choices (or best_of) instead of drawing tokens.",
        json_schema_extra=different(
            "as in transformers, with n (or best_of) beams; not with sampling parameters"
        ),
    )
    length_penalty: float | None = Field(
        1.0,
        ge=-limits.MAX_LENGTH_PENALTY,
        le=limits.MAX_LENGTH_PENALTY,
        description="With use_beam_search: above 0 long answers are preferred.",
    )
    early_stopping: bool | Literal["never"] | None = Field(
        False,
        description="With use_beam_search: whether to stop once enough beams have ended; never: "
        "only when no other can become better.",
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(
        None,
        description="Where the operator says so, requests are limited and queued by it.",
        json_schema_extra=USER,
    )
    allowed_token_ids: Annotated[NamedTokenIds, Field(min_length=1)] | None = Field(
        None, description="The only tokens that may be generated."
    )
    bad_words: (
        Annotated[list[BadWord], Field(max_length=limits.MAX_BAD_WORDS, fail_fast=True)] | None
    ) = Field(
        None, description="Words that the output must not contain, each as the model spells it."
    )
    prompt_logprobs: Alternatives | None = Field(
        None,
        description="Alternatives reported beside each token of the prompt; -1: all tokens.",
        json_schema_extra=different("not in a stream; bounded by --max-logprobs"),
    )
    logprob_token_ids: (
        Annotated[list[TokenId], Field(max_length=limits.MAX_SCORED_TOKENS, fail_fast=True)] | None
    ) = Field(
        None,
        description="With logprobs: the alternatives reported, instead of the likeliest.",
        json_schema_extra=different("needs logprobs; cannot be combined with echo"),
    )
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = Field(
        None,
        description="Log probabilities name each token as token_id:ID; default: as the operator "
        "has set it.",
    )
    response_format: ResponseFormat | None = None
    kv_transfer_params: KvTransferParams | None = Field(
        None,
        description="Where an outside router has KV blocks of the prompt handed on.",
        json_schema_extra=different("refused unless the operator allows it"),
    )
    truncate_prompt_tokens: Alternatives | None = Field(
        None, description="Keep only this many of the prompt's tokens; -1: all that fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where the prompt is cut: left, the default, keeps its last tokens."
    )

    undeclared: ClassVar[Rows] = {
        **LABELS,
        **NO_MEDIA,
        **UNSERVED,
        **ignored("tokenizers here never add such spaces", "spaces_between_special_tokens"),
        **ignored("how many tokens a chunk has is the server's choice", "stream_interval"),
        **ignored(
            "for endpoints that only render prompts", "return_token_offsets return_mm_kwargs"
        ),
        **ignored("there is one way to enforce grammars", "guided_decoding_backend"),
    }
