"""The endpoint-independent form of a generation request."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from engine.shared.messages import (
    AddRequest,
    EncoderInput,
    KvSource,
    RequestTiming,
    SamplingParams,
)
from server.access.admission import Reservation
from server.answer.reader import AnswerPlan
from server.errors import ApiError
from server.generate.beams import Beams
from server.schema.answer import PromptTokensDetails, Usage
from server.schema.body import JsonObject
from server.schema.fields import SamplingFields
from server.schema.kv_transfer import RemoteKvBlocks
from server.schema.messages import ChatMessage
from server.schema.tools import Tool, ToolChoice

if TYPE_CHECKING:
    from server.media.images import PreparedImage


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as turns for the chat template, with constraints on its answers."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[JsonObject] | None = None
    template: str | None = None
    """A chat template that replaces the model's."""
    template_arguments: JsonObject | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    show_reasoning: bool = True
    thinking_budget: int | None = None
    """Maximum reasoning tokens; None: all but a reserve of the answer's tokens."""
    echo: bool = False
    """Whether answers repeat the last message, if it is an assistant's."""
    shortened: bool = False
    """Whether the oldest turns are dropped if the conversation does not fit."""
    images: "Mapping[int, PreparedImage]" = {}
    """Images of the messages, by the `id` of the message part; other media are refused."""

    @property
    def shown_images(self) -> "list[PreparedImage]":
        """The images in the order of the messages."""
        if not self.images:
            return []
        parts = [part for message in self.messages for part in message.parts]
        return [self.images[id(part)] for part in parts if id(part) in self.images]


class Prompt(msgspec.Struct, frozen=True):
    """One prompt; `text` is None when the client sent token ids."""

    token_ids: list[int]
    text: str | None
    encoder_inputs: tuple[EncoderInput, ...] = ()
    """Images of the prompt, by position."""


class GenerationRequest(msgspec.Struct, kw_only=True, eq=False):
    """A request for text, in terms that all endpoints share.

    An endpoint's `parse` validates the fields and fills in the first section, without rendering or
    tokenizing. `server.api.generation` adds the sender; `specify` adds the parameters for engines
    and for parsing answers.
    """

    # -- what the client requests; exactly one of the three lists of prompts is not empty

    fields: SamplingFields
    conversations: list[Conversation] = []
    texts: list[str] = []
    token_lists: list[list[int]] = []
    add_special_tokens: bool = True
    """Whether to add BOS/EOS or similar tokens to `texts`."""
    is_batch: bool = False
    """Whether several conversations are answered together; they differ only in their messages,
    and have no tools."""
    max_model_len: int
    """Maximum sequence length in tokens."""
    n: int = 1
    """Answers per prompt to return."""
    best_of: int = 1
    """Sequences per prompt to generate, of which the n best are returned."""
    max_tokens: int | None = None
    """Maximum tokens per sequence; None if not limited by the request."""
    default_tokens: int | None = None
    """Maximum if neither the request nor the model specifies one; None: all that fit."""
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Alternatives to report per answer token; None for no log probabilities."""
    echo: bool = False
    """Whether answers begin with their prompt, with scores if answers have them."""
    only_echo: bool = False
    """Whether only the prompt is returned; the one token that must be sampled is dropped."""
    repeats_prompt: bool = False
    """Whether the answer includes the prompt for each sequence."""
    scores: int = 0
    """Log probabilities per generated token held until the answer is complete."""
    prompt_scores: int = 0
    """Log probabilities per prompt token held for each sequence."""
    tokens_field: str = "max_tokens"
    """Field that errors about `max_tokens` name; the next two are for scores."""
    scores_field: str = "logprobs"
    prompt_scores_field: str = "prompt_logprobs"
    blame: Callable[[ApiError], ApiError] | None = None
    """Rewrites errors about these fields in terms of the fields that the client sent."""

    # -- the sender, and options of the server

    request_id: str = ""
    model: str = ""
    """The name by which the client addressed the model."""
    created: int = 0
    """Unix time."""
    arrived: float = 0.0
    """Arrival time in monotonic seconds."""
    pinned_rank: int | None = None
    """Rank of the only engine that may run it."""
    reservation: Reservation | None = None
    tenant: int = 0
    cache_root: bytes = b""
    adapter: str = ""
    offers_blocks: bool = False
    kv_source: KvSource | None = None
    """This and the four fields above as in `engine.shared.messages.AddRequest`."""
    transfer_params: Callable[[], RemoteKvBlocks | None] | None = None
    """Returns the KV transfer parameters for the answer, if any."""
    shows_cached: bool = True
    """Whether the usage includes cached prompt tokens."""
    shows_timing: bool = False
    """Whether the answer includes timing."""
    force_usage: bool = False
    """Whether a stream ends with usage even if it was not requested."""

    # -- parameters of engines, and parsing of answers

    prompts: list[Prompt] = []
    sampling: SamplingParams = SamplingParams(max_tokens=1, seed=0)
    """Parameters of the first sequence; sequence i uses seed + i."""
    beams: Beams | None = None
    """Beam search parameters; None to sample."""
    plan: AnswerPlan = AnswerPlan()
    """How answers are split into reasoning, content and tool calls."""
    skip_special_tokens: bool = True
    timing: RequestTiming | None = None
    """Timing of the first sequence in engines, set when it ends."""

    @property
    def num_prompts(self) -> int:
        return len(self.conversations or self.texts or self.token_lists)

    @property
    def num_sequences(self) -> int:
        """Total sequences of all prompts."""
        return self.num_prompts * self.best_of

    @property
    def num_answers(self) -> int:
        """Total sequences that are returned."""
        return self.num_prompts * self.n

    @property
    def conversation(self) -> Conversation | None:
        """The first conversation, which determines parsing of answers; None for other prompts."""
        return self.conversations[0] if self.conversations else None

    @property
    def num_prompt_tokens(self) -> int:
        """Total tokens of all prompts, each counted once."""
        return sum([len(prompt.token_ids) for prompt in self.prompts])

    @property
    def num_tokens_sent(self) -> int:
        """Total tokens sent to engines; beam searches resend sequences at each step."""
        sent = self.best_of * self.num_prompt_tokens
        if self.beams is not None:
            sent += self.num_sequences * self.sampling.max_tokens
        return sent

    def message(
        self,
        name: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        group: int,
        encoder_inputs: Sequence[EncoderInput] = (),
    ) -> AddRequest:
        """Return the message to an engine for one sequence; `group` as in `AddRequest`."""
        return AddRequest(
            id=0,
            request_id=name,
            front_end=0,
            wave=0,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            priority=self.fields.priority or 0,
            tenant=self.tenant,
            cache_root=self.cache_root,
            group=group,
            adapter=self.adapter,
            encoder_inputs=list(encoder_inputs),
            offers_blocks=self.offers_blocks,
            kv_source=self.kv_source,
        )

    def usage(self, completion_tokens: int, cached_tokens: int) -> Usage:
        """Return the usage visible to this client; each prompt counts once."""
        prompt_tokens = self.num_prompt_tokens
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens) if self.shows_cached else UNSET,
        )
