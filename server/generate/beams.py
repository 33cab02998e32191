"""Beam search: selection of the continuations to extend, and of the best finished ones.

The rules, including the stopping criteria, follow `GenerationMixin._beam_search` in transformers.
A state machine without I/O: its input is the log probabilities of every beam's next tokens.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.shared.messages import TokenLogprob
from server.errors import invalid_field
from server.limits import MAX_BEAM_CANDIDATES, MAX_BEAMS
from server.schema.fields import SamplingFields

EarlyStopping = bool | Literal["never"]


class Beams(msgspec.Struct, frozen=True):
    """Parameters of a beam search."""

    width: int
    """Number of beams extended at each step."""
    length_penalty: float = 1.0
    """The sum of a beam's log probabilities is divided by its length to this power."""
    early_stopping: EarlyStopping = False
    """True: stop once `width` beams have ended; False: once a better one seems unlikely; "never":
    once a better one is impossible."""


_NOT_SEARCHED: dict[str, tuple[object, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None,),
    "min_tokens": (None, 0),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "stop": (None, []),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None, []),
    "response_format": (None,),
    "structured_outputs": (None,),
    "stream": (None, False),
    "tools": (None,),
    "echo": (None, False),
    "thinking_token_budget": (None, -1),
}
"""Fields that searches ignore, each with its no-op values."""


def beams_of(fields: SamplingFields, width: int) -> Beams | None:
    """Return the beam search parameters of a request; None if it samples.

    `width` is the number of sequences per prompt.

    Raises:
        ApiError: the request sets a field that searches do not support.
    """
    if not fields.use_beam_search:
        return None
    for name, neutral in _NOT_SEARCHED.items():
        if getattr(fields, name, None) not in neutral:
            raise invalid_field(name, "cannot be combined with use_beam_search")
    if width > MAX_BEAMS:
        raise invalid_field("n", f"at most {MAX_BEAMS} beams are supported")
    return Beams(
        width,
        1.0 if fields.length_penalty is None else fields.length_penalty,
        False if fields.early_stopping is None else fields.early_stopping,
    )


def check_candidates(beams: Beams, searches: int, named_ends: int, other_ends: int) -> None:
    """Limit the number of candidate tokens of all searches of a request at each step.

    Args:
        searches: number of searches, one per prompt.
        named_ends: number of stop tokens that the request specifies.
        other_ends: number of the model's stop tokens.

    Raises:
        ApiError: there are too many candidates.
    """
    count = searches * beams.width * alternatives(beams.width, named_ends + other_ends)
    if count > MAX_BEAM_CANDIDATES:
        field = "stop_token_ids" if named_ends else "n"
        raise invalid_field(
            field,
            f"{searches} searches with {beams.width} beams, of which "
            f"{named_ends + other_ends} tokens are an end, choose from {count} next tokens at each "
            f"step, more than {MAX_BEAM_CANDIDATES}",
        )


def alternatives(width: int, ends: int) -> int:
    """Return the number of candidates per beam that ensures enough beams can continue."""
    return max(2, 1 + ends) * width


class Beam(msgspec.Struct, frozen=True):
    """One continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    """Log probabilities of each token and its alternatives."""
    logprob_sum: float = 0.0
    ended: bool = False
    """Whether its last token is a stop token."""


class _Candidate(msgspec.Struct, frozen=True):
    logprob_sum: float
    beam: Beam
    scores: TokenLogprob
    rank: int
    """Rank of the token among the beam's next tokens, 0 for the most likely."""


class BeamSearch:
    """The search for the best continuations of one prompt.

    Args:
        max_tokens: maximum length of a continuation.
        ends: stop tokens.
        shown: number of alternatives to each token that are kept.
    """

    def __init__(self, beams: Beams, max_tokens: int, ends: frozenset[int], shown: int = 0) -> None:
        self._beams = beams
        self._max_tokens = max_tokens
        self._ends = ends
        self._shown = shown
        self.num_alternatives = alternatives(beams.width, len(ends))
        """Number of candidates needed for each beam."""
        self.running = [Beam()]
        """Beams to extend, the most likely first; empty once the search has ended."""
        self._finished: list[tuple[float, Beam]] = []
        self._open = True
        """Whether a running beam can still become one of the best."""

    def advance(self, following: Sequence[TokenLogprob]) -> None:
        """Extend every beam in `running` by its most likely next tokens."""
        candidates = sorted(
            [
                _Candidate(beam.logprob_sum + logprob, beam, scores, rank)
                for beam, scores in zip(self.running, following, strict=True)
                for rank, logprob in enumerate(scores.top_logprobs[: self.num_alternatives])
            ],
            key=lambda candidate: -candidate.logprob_sum,
        )[: self.num_alternatives]
        width = self._beams.width
        length = len(self.running[0].token_ids) + 1
        at_end = [
            length == self._max_tokens or each.scores.top_ids[each.rank] in self._ends
            for each in candidates
        ]
        self._finish([each for each, ends in zip(candidates[:width], at_end, strict=False) if ends])
        going_on = [each for each, ends in zip(candidates, at_end, strict=True) if not ends]
        self.running = [self._extended(each) for each in going_on[:width]]
        if not self.running or not self._can_continue(length):
            self.running = []

    def best(self, count: int) -> list[Beam]:
        """Return the best finished beams, best first."""
        return [beam for _, beam in self._finished[:count]]

    def _finish(self, candidates: Sequence[_Candidate]) -> None:
        full = len(self._finished) == self._beams.width and self._beams.early_stopping is True
        if full or not self._open:
            return
        for each in candidates:
            beam = self._extended(each)
            score = beam.logprob_sum / len(beam.token_ids) ** self._beams.length_penalty
            self._finished.append((score, beam))
        self._finished.sort(key=lambda scored: -scored[0])
        del self._finished[self._beams.width :]

    def _can_continue(self, length: int) -> bool:
        full = len(self._finished) == self._beams.width
        early, penalty = self._beams.early_stopping, self._beams.length_penalty
        if full:
            length_limit = self._max_tokens if early == "never" and penalty > 0 else length
            best_possible = self.running[0].logprob_sum / length_limit**penalty
            self._open = self._open and best_possible > self._finished[-1][0]
        return self._open and not (full and early is True)

    def _extended(self, candidate: _Candidate) -> Beam:
        beam, scores, rank = candidate.beam, candidate.scores, candidate.rank
        token_id = scores.top_ids[rank]
        top_ids, top_logprobs = scores.top_ids[: self._shown], scores.top_logprobs[: self._shown]
        chosen = TokenLogprob(scores.top_logprobs[rank], rank + 1, top_ids, top_logprobs)
        return Beam(
            (*beam.token_ids, token_id),
            (*beam.scores, chosen),
            candidate.logprob_sum,
            token_id in self._ends,
        )
