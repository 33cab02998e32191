"""Log probabilities of tokens as chat completions and responses show them."""

from collections.abc import Callable, Iterator, Sequence

from server.api.chat.schema import ChatLogprob, ChatLogprobs, TopLogprob
from server.api.logprobs import MIN_LOGPROB, token_names
from server.generate.fold import ScoredToken
from server.generate.request import GenerationRequest
from server.schema.encoded import encoded_list
from server.text.detokenizer import TokenTable


def chat_logprobs(
    tokens: Sequence[ScoredToken] | None, request: GenerationRequest, table: TokenTable
) -> ChatLogprobs | None:
    """Return the log probabilities of tokens as chat completions show them."""
    return None if tokens is None else ChatLogprobs(list(_shown(tokens, request, table)))


def whole_logprobs(
    tokens: Sequence[ScoredToken] | None, request: GenerationRequest, table: TokenTable
) -> ChatLogprobs | None:
    """Return the same as JSON already."""
    return None if tokens is None else ChatLogprobs(encoded_list(_shown(tokens, request, table)))


def _shown(
    tokens: Sequence[ScoredToken], request: GenerationRequest, table: TokenTable
) -> Iterator[ChatLogprob]:
    alternatives = request.sampling.logprobs or 0
    name_of = token_names(table, ids=request.names_ids)
    return (_logprob(token, table, name_of, alternatives) for token in tokens)


def _logprob(
    token: ScoredToken, table: TokenTable, name_of: Callable[[int], str], shown: int
) -> ChatLogprob:
    scores = token.logprob
    assert scores is not None, "only a prompt's first token has no log probability"
    alternatives = zip(scores.top_ids[:shown], scores.top_logprobs[:shown], strict=True)
    return ChatLogprob(
        name_of(token.token_id),
        max(scores.logprob, MIN_LOGPROB),
        list(table.bytes_of(token.token_id)),
        [
            TopLogprob(
                name_of(token_id),
                max(logprob, MIN_LOGPROB),
                list(table.bytes_of(token_id)),
            )
            for token_id, logprob in alternatives
        ],
    )
