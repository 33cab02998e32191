"""How tokens and their log probabilities are shown, in answers and for prompts."""

from collections.abc import Callable, Iterator, Sequence

from engine.shared.messages import TokenLogprob
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
