"""Limits on the total answer of a request: number of sequences times cost per sequence.

Checked before tokenization, and again once the prompt lengths are known. If a request sets no
limit, its answer is limited to what fits.
"""

from server import limits
from server.errors import invalid_field
from server.generate.request import GenerationRequest
from server.schema.fields import SamplingFields


def check_size(request: GenerationRequest) -> None:
    """Check the limits that are known before tokenization.

    Raises:
        ApiError: a limit is exceeded; `param` names the responsible field.
    """
    sequences = request.num_sequences
    if sequences > limits.MAX_SEQUENCES:
        raise invalid_field(
            "prompt",
            f"{sequences} sequences (prompts times choices), more than {limits.MAX_SEQUENCES}",
        )
    # The cost of searching each sequence for stop strings at every token.
    stops, characters = request.stop, sum(map(len, request.stop))
    if characters > limits.MAX_STOP_CHARACTERS:
        raise invalid_field(
            "stop",
            f"{characters} characters in {len(stops)} strings are more than "
            f"{limits.MAX_STOP_CHARACTERS}",
        )
    if len(stops) * sequences > limits.MAX_STOP_SEARCHES:
        raise invalid_field(
            "stop",
            f"{len(stops)} strings in each of {sequences} sequences are more than "
            f"{limits.MAX_STOP_SEARCHES} in all",
        )
    check_named_tokens(request.fields, sequences)
    room_for_output(request, sum(map(len, request.token_lists)))


def room_for_output(request: GenerationRequest, prompt_tokens: int) -> int:
    """Return the maximum tokens per sequence: at least one, at most the requested number.

    `prompt_tokens` is the total of all prompts known so far.

    Raises:
        ApiError: the answer could become too large; `param` names the responsible field.
    """
    sequences = request.num_sequences
    max_tokens = min(request.max_tokens or 1, request.max_model_len)
    shown = prompt_tokens * request.best_of
    tokens = limits.MAX_ANSWER_TOKENS - (shown if request.repeats_prompt else 0)
    if sequences * max_tokens > tokens:
        field = request.tokens_field
        raise invalid_field(
            field,
            f"{sequences} sequences of {max_tokens} tokens, with the prompts that the "
            f"answer repeats, are more than the {limits.MAX_ANSWER_TOKENS} that a request may have",
        )
    if request.fields.use_beam_search:
        of_beams = limits.MAX_BEAM_TOKENS - shown  # in addition to their prompt tokens
        if sequences * max_tokens > of_beams:
            raise invalid_field(
                "n",
                f"{sequences} beams with {shown} tokens of their prompts and {max_tokens} more for "
                f"each are more than the {limits.MAX_BEAM_TOKENS} that a search sends to engines "
                "at each step",
            )
        tokens = min(tokens, of_beams)
    room = tokens // sequences
    per_token = request.scores
    scores = limits.MAX_SCORES - shown * request.prompt_scores
    if scores < sequences * max_tokens * per_token or scores < 0:
        of_answer = per_token and scores >= 0
        field = request.scores_field if of_answer else request.prompt_scores_field
        raise invalid_field(
            field,
            f"the answer could hold more than {limits.MAX_SCORES} log probabilities (sequences "
            "times tokens times alternatives); ask for fewer tokens or alternatives, or in "
            "several requests",
        )
    if per_token:
        room = min(room, scores // (sequences * per_token))
    return room


def check_named_tokens(fields: SamplingFields, sequences: int, of_bad_words: int = 0) -> None:
    """Limit the number of token IDs that the sampling fields specify.

    Args:
        sequences: number of sequences that each store all of them.
        of_bad_words: number of token IDs of the bad words, if known.

    Raises:
        ApiError: there are too many; `param` names the field with most of them.
    """
    named = {
        "stop_token_ids": len(fields.stop_token_ids or ()),
        "logit_bias": len(fields.logit_bias or ()),
        "allowed_token_ids": len(fields.allowed_token_ids or ()),
        "bad_words": max(of_bad_words, len(fields.bad_words or ())),
    }
    total = sum(named.values())
    if total * sequences > limits.MAX_NAMED_TOKENS:
        field = max(named, key=lambda name: named[name])
        raise invalid_field(
            field,
            f"{total} token ids in the sampling fields of {sequences} sequences are more "
            f"than {limits.MAX_NAMED_TOKENS} in all",
        )
