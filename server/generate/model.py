"""The served model as seen by requests, created once per process."""

from typing import TYPE_CHECKING

import msgspec

from server.answer.formats import AnswerFormats
from server.errors import invalid_field
from server.generate.grammar_check import GrammarCheck
from server.generate.pooling import PoolingModel
from server.schema.fields import SamplingFields
from server.text.request_templates import RequestTemplates
from server.text.tokenizer import ServedTokenizer, check_vocabulary

if TYPE_CHECKING:
    from server.media.images import Images


class ServedModel(msgspec.Struct, frozen=True):
    """What requests are validated, rendered, tokenized and given sampling defaults with."""

    tokenizer: ServedTokenizer
    formats: AnswerFormats
    """Format of reasoning and tool calls in the model's output."""
    grammars: GrammarCheck
    templates: RequestTemplates | None
    """Renders chat templates sent in requests, if these are trusted."""
    pooling: PoolingModel | None = None
    """Set for a pooling model, which generates no text."""
    max_logprobs: int = -1
    """Maximum number of alternatives that a request can ask for; -1: the whole vocabulary."""
    images: "Images | None" = None
    """Preprocesses images, if the model takes them."""

    def alternatives(self, requested: int, field: str) -> int:
        """Validate a requested number of alternatives; -1 requests the whole vocabulary.

        Raises:
            ApiError: it exceeds `max_logprobs`.
        """
        vocab_size = self.tokenizer.vocab_size
        count = vocab_size if requested == -1 else requested
        if 0 <= self.max_logprobs < count:
            raise invalid_field(field, f"at most {self.max_logprobs} are supported")
        return min(count, vocab_size)

    def scored(self, named: list[int] | None, likeliest: int | None, field: str) -> int | None:
        """Return the number of alternatives to report per answer token; None for no scores.

        Args:
            named: token IDs that the request names (`logprob_token_ids`).
            likeliest: number of most likely tokens requested in `field`; None for no scores.
            field: name of that field.

        Raises:
            ApiError: the number exceeds the limit, or `named` is set without scores.
        """
        if likeliest is None and named:
            raise invalid_field("logprob_token_ids", "needs logprobs")
        if likeliest is None:
            return None
        return len(named) if named else self.alternatives(likeliest, field)

    def check_fields(self, request: SamplingFields) -> tuple[str, ...]:
        """Run the checks that need no tokens; return the stop strings.

        Raises:
            ApiError: the request is invalid or exceeds a limit; `param` names the field.
        """
        if request.prompt_logprobs is not None:
            if request.stream:
                raise invalid_field("prompt_logprobs", "not available when stream is true")
            request.prompt_logprobs = self.alternatives(request.prompt_logprobs, "prompt_logprobs")
        named = request.logprob_token_ids
        if named:
            check_vocabulary(named, self.tokenizer.vocab_size, "logprob_token_ids")
            if len(set(named)) < len(named):
                raise invalid_field("logprob_token_ids", "it contains a token twice")
        if request.stream_options is not None and not request.stream:
            raise invalid_field("stream_options", "only allowed when stream is true")
        stop = request.stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "" in stops:
            raise invalid_field("stop", "strings must not be empty")
        if request.truncate_prompt_tokens == 0:
            raise invalid_field("truncate_prompt_tokens", "must be -1 or at least 1")
        return stops
