"""One request of a client, from what an endpoint made of its body to its last token."""

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
from server.schema.kv_transfer import KvHandedOn
from server.schema.messages import ChatMessage
from server.schema.tools import Tool, ToolChoice

if TYPE_CHECKING:
    from server.media.images import PreparedImage


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
    """Tokens after which reasoning is ended; None: when little is left of the answer's tokens."""
    echo: bool = False
    """Each answer repeats the last message, if an assistant said it."""
    shortened: bool = False
    """The oldest turns are left out if the whole does not fit."""
    images: "Mapping[int, PreparedImage]" = {}
    """Those of the messages, by the `id` of the part that names each; others are refused."""

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
    """What it shows besides its text, by position."""


class GenerationRequest(msgspec.Struct, kw_only=True, eq=False):
    """A request for text, in terms that all endpoints share.

    An endpoint's `parse` fills the first part after checking the fields one by one: nothing is
    rendered or tokenized yet. `server.api.generation` adds who sent it, `specify` what engines and
    the readers of answers are told.
    """

    # -- what the client asks for; exactly one of the three lists of prompts is not empty

    fields: SamplingFields
    conversations: list[Conversation] = []
    texts: list[str] = []
    token_lists: list[list[int]] = []
    add_special_tokens: bool = True
    """Whether tokens that begin or end a text are added to `texts`."""
    is_batch: bool = False
    """Whether conversations are answered side by side; they differ only in their messages, and
    have no tools."""
    max_model_len: int
    """Longest sequence in tokens."""
    n: int = 1
    """Answers per prompt that are shown."""
    best_of: int = 1
    """Sequences per prompt, of which the n best are shown."""
    max_tokens: int | None = None
    """Tokens that each sequence may have; None leaves it open."""
    default_tokens: int | None = None
    """Tokens of an answer where neither the request nor the model says; None: all that fit."""
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Alternatives to show beside each token of the answers; None shows no log probabilities."""
    echo: bool = False
    """Answers begin with their prompt, scored if answers are."""
    only_echo: bool = False
    """Only the prompt is shown; the token that has to be drawn is not."""
    repeats_prompt: bool = False
    """Whether the answer shows the prompt beside each sequence."""
    scores: int = 0
    """Log probabilities per generated token that are held until the answer is complete."""
    prompt_scores: int = 0
    """The same per token of the prompt, for each sequence."""
    tokens_field: str = "max_tokens"
    """The field that an error about `max_tokens` names; the next two are for scores."""
    scores_field: str = "logprobs"
    prompt_scores_field: str = "prompt_logprobs"
    blame: Callable[[ApiError], ApiError] | None = None
    """Turns an error about these fields into one about those that the client wrote."""

    # -- who sent it, and how the server answers

    request_id: str = ""
    model: str = ""
    """The name by which the client called the model."""
    created: int = 0
    """Unix time."""
    arrived: float = 0.0
    """When the request came, in monotonic seconds."""
    pinned_rank: int | None = None
    """The only engine that may run it."""
    reservation: Reservation | None = None
    tenant: int = 0
    cache_root: bytes = b""
    adapter: str = ""
    offers_blocks: bool = False
    kv_source: KvSource | None = None
    """These five as in `engine.shared.messages.AddRequest`."""
    handed_on: Callable[[], KvHandedOn | None] | None = None
    """Returns what the answer says of blocks that are offered, if it says anything."""
    shows_cached: bool = True
    """Whether the usage says how much of the prompt was cached."""
    shows_timing: bool = False
    """Whether the answer says how long it took."""
    force_usage: bool = False
    """Whether its stream ends with the usage even if that was not asked for."""

    # -- what is generated, and how it is read

    prompts: list[Prompt] = []
    sampling: SamplingParams = SamplingParams(max_tokens=1, seed=0)
    """Of the first sequence; sequence i draws with seed + i."""
    beams: Beams | None = None
    """How to search for answers instead of drawing them."""
    plan: AnswerPlan = AnswerPlan()
    """How answers are taken apart into reasoning, content and tool calls."""
    skip_special_tokens: bool = True
    timing: RequestTiming | None = None
    """How long the first sequence took in engines, once it has ended."""

    @property
    def num_prompts(self) -> int:
        return len(self.conversations or self.texts or self.token_lists)

    @property
    def num_sequences(self) -> int:
        """Sequences of all prompts."""
        return self.num_prompts * self.best_of

    @property
    def num_answers(self) -> int:
        """Sequences that are shown."""
        return self.num_prompts * self.n

    @property
    def conversation(self) -> Conversation | None:
        """What says how answers are read, if the prompts are conversations: the first of them."""
        return self.conversations[0] if self.conversations else None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum([len(prompt.token_ids) for prompt in self.prompts])

    @property
    def num_tokens_sent(self) -> int:
        """Tokens that engines are sent for all sequences: those of beams are sent at each step."""
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
        """Return what an engine is sent for one sequence; `group` as in `AddRequest`."""
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
        """Return token counts as this client may see them; each prompt counts once."""
        prompt_tokens = self.num_prompt_tokens
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens) if self.shows_cached else UNSET,
        )
