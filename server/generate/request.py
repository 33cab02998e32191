"""What a client asks for, in terms that no endpoint has to itself.

Each endpoint parses its bodies into this; what comes of it is the specification
(`server.generate.specification`).
"""

from collections.abc import Callable

import msgspec

from server.access.budget import AnswerSize
from server.api.shared.body import JsonObject
from server.api.shared.fields import SamplingFields
from server.api.shared.messages import ChatMessage
from server.api.shared.tools import Tool, ToolChoice
from server.http.errors import ApiError, invalid


class Limits(msgspec.Struct, frozen=True):
    """What requests are held against."""

    max_model_len: int
    max_logprobs: int
    """-1: as many as there are tokens."""
    vocab_size: int

    def alternatives(self, asked: int, field: str) -> int:
        """Return how many alternatives a request asks for; -1 asks for all tokens.

        Raises:
            ApiError: more than are served.
        """
        count = self.vocab_size if asked == -1 else asked
        if 0 <= self.max_logprobs < count:
            raise invalid(f"{field}: at most {self.max_logprobs} are served", field)
        return min(count, self.vocab_size)

    def scored(self, named: list[int] | None, likeliest: int | None, field: str) -> int | None:
        """Return how many tokens to report beside each of an answer; None: it has no scores.

        Args:
            named: the tokens that a request names (`logprob_token_ids`).
            likeliest: how many of the likeliest it asks for in `field`; None: it wants no scores.

        Raises:
            ApiError: it asks for more than are served, or names tokens and wants no scores.
        """
        if likeliest is None and named:
            raise invalid("logprob_token_ids: needs logprobs", "logprob_token_ids")
        if likeliest is None:
            return None
        return len(named) if named else self.alternatives(likeliest, field)


class Texts(msgspec.Struct, frozen=True):
    """Prompts as texts."""

    texts: list[str]
    add_special_tokens: bool


class TokenLists(msgspec.Struct, frozen=True):
    """Prompts as token ids."""

    token_lists: list[list[int]]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as turns that the chat template renders, and what its answers may consist of."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[JsonObject] | None = None
    template: str | None = None
    """A chat template instead of the model's."""
    template_arguments: JsonObject | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    show_reasoning: bool = True
    thinking_budget: int | None = None
    """Reasoning of so many tokens is ended; None: when the tokens to generate are."""
    echo: bool = False
    """Each answer repeats the last message, if an assistant said it."""
    shortened: bool = False
    """What was said first is left out where the whole does not fit."""


class Conversations(msgspec.Struct, frozen=True):
    """Several prompts as turns; they differ in nothing but their messages, and have no tools."""

    conversations: list[Conversation]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose fields have been checked one by one; nothing is rendered or tokenized."""

    fields: SamplingFields
    source: Texts | TokenLists | Conversation | Conversations
    size: AnswerSize
    n: int
    """Answers per prompt that are shown."""
    stop: tuple[str, ...]
    logprobs: int | None
    """Alternatives to show beside each token of the answers; None shows no log probabilities."""
    default_tokens: int | None
    """Tokens of an answer where neither the request nor the model says; None: all that fit."""
    echo: bool = False
    """Answers begin with their prompt, scored if answers are."""
    only_echo: bool = False
    """Nothing but the prompt is shown."""
    blame: Callable[[ApiError], ApiError] | None = None
    """Turns an error about these fields into one about those that the client wrote."""

    @property
    def prompt_field(self) -> str:
        """The field that the prompts came in."""
        return "prompt" if self.conversation is None else "messages"

    @property
    def conversation(self) -> Conversation | None:
        """What says how answers are read, if the prompts are conversations: the first of them."""
        match self.source:
            case Conversation():
                return self.source
            case Conversations():
                return self.source.conversations[0]
            case _:
                return None
