"""The served model as requests meet it, made once per process."""

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
    """What requests are checked against and made into prompts and sampling parameters with."""

    tokenizer: ServedTokenizer
    formats: AnswerFormats
    """How the model writes reasoning and tool calls."""
    grammars: GrammarCheck
    templates: RequestTemplates | None
    """Renders templates of requests, where these are trusted."""
    pooling: PoolingModel | None = None
    """Of a model that makes vectors and generates nothing."""
    max_logprobs: int = -1
    """Alternatives that a request may ask for; -1: as many as there are tokens."""
    images: "Images | None" = None
    """Prepares images, of a model that takes them."""

    def alternatives(self, asked: int, field: str) -> int:
        """Return how many alternatives a request asks for; -1 asks for all tokens.

        Raises:
            ApiError: more than are served.
        """
        vocab_size = self.tokenizer.vocab_size
        count = vocab_size if asked == -1 else asked
        if 0 <= self.max_logprobs < count:
            raise invalid_field(field, f"at most {self.max_logprobs} are served")
        return min(count, vocab_size)

    def scored(self, named: list[int] | None, likeliest: int | None, field: str) -> int | None:
        """Return how many tokens to report beside each of an answer; None: it has no scores.

        Args:
            named: the tokens that a request names (`logprob_token_ids`).
            likeliest: how many of the likeliest it asks for in `field`; None: it wants no scores.
            field: the name of that field.

        Raises:
            ApiError: it asks for more than are served, or names tokens and wants no scores.
        """
        if likeliest is None and named:
            raise invalid_field("logprob_token_ids", "needs logprobs")
        if likeliest is None:
            return None
        return len(named) if named else self.alternatives(likeliest, field)

    def check_fields(self, request: SamplingFields) -> tuple[str, ...]:
        """Check what can be checked without tokenizing; return the texts that end an answer.

        Raises:
            ApiError: the request is wrong, or asks for too much; `param` names the field.
        """
        if request.prompt_logprobs is not None:
            if request.stream:
                raise invalid_field("prompt_logprobs", "not available when stream is true")
            request.prompt_logprobs = self.alternatives(request.prompt_logprobs, "prompt_logprobs")
        named = request.logprob_token_ids
        if named:
            check_vocabulary(named, self.tokenizer.vocab_size, "logprob_token_ids")
            if len(set(named)) < len(named):
                raise invalid_field("logprob_token_ids", "a token is named twice")
        if request.stream_options is not None and not request.stream:
            raise invalid_field("stream_options", "only allowed when stream is true")
        stop = request.stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "" in stops:
            raise invalid_field("stop", "strings must not be empty")
        if request.truncate_prompt_tokens == 0:
            raise invalid_field("truncate_prompt_tokens", "must be -1 or at least 1")
        return stops
