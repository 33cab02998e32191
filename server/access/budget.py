"""What a request may ask for in all: its sequences times what each of them costs.

Checked before anything is tokenized as far as the request itself tells, and again once the
lengths of its prompts are known. What a request leaves open is cut to what fits.
"""

import msgspec

from server.access.limits import (
    MAX_ANSWER_TOKENS,
    MAX_BEAM_TOKENS,
    MAX_NAMED_TOKENS,
    MAX_SCORES,
    MAX_SEQUENCES,
)
from server.api.shared.fields import SamplingFields
from server.http.errors import invalid


class AnswerSize(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how large an answer can get, and the names of the fields that say so."""

    prompts: int
    copies: int
    """Sequences per prompt."""
    max_tokens: int | None
    """Tokens that each sequence may have; None leaves it open."""
    repeats_prompt: bool
    """Whether the answer shows the prompt beside each sequence."""
    searched: bool = False
    """Whether the sequences are beams, all of whose tokens are sent to engines at each step."""
    scores: int = 0
    """Log probabilities per token of the output that are kept until the answer is complete."""
    prompt_scores: int = 0
    """The same per token of the prompt, for each copy."""
    tokens_field: str
    scores_field: str
    prompt_scores_field: str = "prompt_logprobs"

    @property
    def sequences(self) -> int:
        """Sequences of all prompts."""
        return self.prompts * self.copies


def check_size(size: AnswerSize, request: SamplingFields, prompt_tokens: int, longest: int) -> None:
    """Check what is known before anything is tokenized.

    Args:
        size: of the answer.
        request: whose it is.
        prompt_tokens: those that the prompts have for certain.
        longest: tokens that a sequence can have, whatever is asked for.

    Raises:
        ApiError: it is too much.
    """
    if size.sequences > MAX_SEQUENCES:
        raise invalid(
            f"prompt: {size.sequences} sequences (prompts times choices), "
            f"more than {MAX_SEQUENCES}",
            "prompt",
        )
    check_named_tokens(request, size.sequences)
    room_for_output(size, prompt_tokens, longest)


def room_for_output(size: AnswerSize, prompt_tokens: int, longest: int) -> int:
    """Return how many tokens each sequence may have, at least one and what the request asks for.

    Args:
        size: of the answer.
        prompt_tokens: of all prompts, as far as they are known.
        longest: tokens that a sequence can have, whatever is asked for.

    Raises:
        ApiError: the answer could get too large; `param` names the field that makes it so.
    """
    asked = min(size.max_tokens or 1, longest)
    shown = prompt_tokens * size.copies
    tokens = MAX_ANSWER_TOKENS - (shown if size.repeats_prompt else 0)
    if size.sequences * asked > tokens:
        field = size.tokens_field
        raise invalid(
            f"{field}: {size.sequences} sequences of {asked} tokens, with the prompts that the "
            f"answer repeats, are more than the {MAX_ANSWER_TOKENS} that a request may have",
            field,
        )
    if size.searched:
        tokens = min(tokens, _tokens_of_beams(size, asked, shown))
    room = tokens // size.sequences
    scores = MAX_SCORES - shown * size.prompt_scores
    if scores < size.sequences * asked * size.scores or scores < 0:
        field = size.scores_field if size.scores and scores >= 0 else size.prompt_scores_field
        raise invalid(
            f"{field}: the answer could hold more than {MAX_SCORES} log probabilities (sequences "
            "times tokens times alternatives); ask for fewer tokens or alternatives, or in "
            "several requests",
            field,
        )
    if size.scores:
        room = min(room, scores // (size.sequences * size.scores))
    return room


def _tokens_of_beams(size: AnswerSize, asked: int, prompt_tokens: int) -> int:
    """Return how many tokens all beams may have beside those of their prompts.

    Raises:
        ApiError: fewer than they are to have.
    """
    tokens = MAX_BEAM_TOKENS - prompt_tokens
    if size.sequences * asked > tokens:
        raise invalid(
            f"n: {size.sequences} beams with {prompt_tokens} tokens of their prompts and {asked} "
            f"more for each are more than the {MAX_BEAM_TOKENS} that a search sends to engines at "
            "each step",
            "n",
        )
    return tokens


def check_named_tokens(request: SamplingFields, sequences: int, of_bad_words: int = 0) -> None:
    """Check how many token ids the sampling fields name.

    Args:
        request: whose fields they are.
        sequences: that hold all of them.
        of_bad_words: token ids that spell the words, if they are known.

    Raises:
        ApiError: too many; `param` names the field with most of them.
    """
    named = {
        "stop_token_ids": len(request.stop_token_ids or ()),
        "logit_bias": len(request.logit_bias or ()),
        "allowed_token_ids": len(request.allowed_token_ids or ()),
        "bad_words": max(of_bad_words, len(request.bad_words or ())),
    }
    total = sum(named.values())
    if total * sequences > MAX_NAMED_TOKENS:
        field = max(named, key=lambda name: named[name])
        raise invalid(
            f"{field}: {total} token ids in the sampling fields of {sequences} sequences are more "
            f"than {MAX_NAMED_TOKENS} in all",
            field,
        )
