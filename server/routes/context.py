"""What every endpoint needs, made once per process."""

import msgspec

from engine.model_files import served_names
from server.config import FrontEndConfig
from server.detokenizer import TokenTable
from server.errors import model_not_found
from server.generation_client import GenerationClient
from server.metrics import FrontEndMetrics
from server.preprocess import Limits
from server.tokenizer import ServedTokenizer


class Context(msgspec.Struct, frozen=True):
    """The parts of a front end that endpoints use."""

    client: GenerationClient
    tokenizer: ServedTokenizer
    table: TokenTable
    metrics: FrontEndMetrics
    names: tuple[str, ...]
    max_logprobs: int
    created: int
    """Unix time at which this process began to serve."""

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with.

        Raises:
            ApiError: 404, no served model has that name.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise model_not_found(asked)
        return asked

    def limits(self) -> Limits:
        """Return what requests are held against now.

        Raises:
            NoEngineAvailable: no engine has joined yet.
        """
        return Limits(self.client.max_model_len, self.max_logprobs)


def make_context(
    config: FrontEndConfig,
    client: GenerationClient,
    tokenizer: ServedTokenizer,
    metrics: FrontEndMetrics,
    created: int,
) -> Context:
    """Return the context of a front end."""
    return Context(
        client=client,
        tokenizer=tokenizer,
        table=TokenTable(tokenizer),
        metrics=metrics,
        names=served_names(config.model),
        max_logprobs=config.http.max_logprobs,
        created=created,
    )
