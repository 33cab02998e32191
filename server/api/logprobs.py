"""How tokens and their log probabilities are shown, in answers and for prompts."""

from collections.abc import Callable, Iterator, Sequence

from engine.shared.messages import TokenLogprob
from server.api.chat.schema import ChatLogprob, ChatLogprobs, TopLogprob
from server.generate.fold import ScoredToken
from server.generate.request import GenerationRequest
from server.schema.answer import PromptLogprob, PromptLogprobs
from server.schema.encoded import encoded_list
from server.text.detokenizer import TokenTable

MIN_LOGPROB = -9999.0
"""JSON has no infinity; this is what clients of such servers know as "impossible"."""


def token_names(table: TokenTable, *, ids: bool) -> Callable[[int], str]:
    """Return what names tokens: as their ids if a client wants to tell all of them apart."""
    return "token_id:{}".format if ids else table.name_of


def prompt_scores(
    token_ids: Sequence[int], scores: Sequence[TokenLogprob], table: TokenTable
) -> PromptLogprobs:
    """Return one entry per token of the prompt, as JSON already.

    Args:
        token_ids: the prompt.
        scores: of every token but the first.
        table: names tokens.
    """

    def entries() -> Iterator[dict[str, PromptLogprob] | None]:
        yield None
        for token_id, score in zip(token_ids[1:], scores, strict=True):
            found = {str(token_id): _entry(token_id, score.logprob, score.rank, table)}
            best = zip(score.top_ids, score.top_logprobs, strict=True)
            for rank, (other, logprob) in enumerate(best, 1):
                found.setdefault(str(other), _entry(other, logprob, rank, table))
            yield found

    return encoded_list(entries())


def _entry(token_id: int, logprob: float, rank: int, table: TokenTable) -> PromptLogprob:
    return PromptLogprob(max(logprob, MIN_LOGPROB), rank, table.name_of(token_id))


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
