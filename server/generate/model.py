"""The served model as requests meet it, made once per process."""

from typing import TYPE_CHECKING

import msgspec

from server.answer.formats import AnswerFormats
from server.errors import invalid_field
from server.generate.grammar_check import GrammarCheck
from server.generate.pooling.inputs import PoolingModel
from server.text.request_templates import RequestTemplates
from server.text.tokenizer import ServedTokenizer

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
