"""Per-slot state of a runner between steps, in arrays indexed by slot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.batch.batch import SlotBlocks, SlotStart
from engine.shared.messages import SamplingParams

NO_LOGPROBS = -1

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class BadWords:
    """Token sequences that must not appear in an output, indexed by their prefixes.

    The cost of a lookup depends on the number of distinct lengths among prefixes with the same last
    token, not on the number of words.
    """

    __slots__ = ("_alone", "_beginnings", "_lengths", "_longest")

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        """Index words; those whose last token is outside the vocabulary are dropped."""
        found: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if word and 0 <= word[-1] < vocab_size:
                found.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._alone = np.array(found.pop((), ()), np.int64)
        self._beginnings = {
            beginning: np.array(tokens, np.int64) for beginning, tokens in found.items()
        }
        """Last tokens by the tokens before them."""
        lengths: dict[int, set[int]] = {}
        for beginning in found:
            lengths.setdefault(beginning[-1], set()).add(len(beginning))
        self._lengths = {token: sorted(each) for token, each in lengths.items()}
        """Lengths of the prefixes that end with a token."""
        self._longest = max(map(len, found), default=0)

    def __bool__(self) -> bool:
        """Whether there are any words."""
        return bool(len(self._alone) or self._beginnings)

    def completing(self, output: npt.NDArray[np.int32]) -> IntArray:
        """Return the tokens that would complete a word after this output."""
        if not len(output) or (lengths := self._lengths.get(int(output[-1]))) is None:
            return self._alone
        newest = output[-self._longest :].tolist()
        found = [self._alone]
        for length in lengths:
            if length > len(newest):
                break
            tokens = self._beginnings.get(tuple(newest[-length:]))
            if tokens is not None:
                found.append(tokens)
        return np.concatenate(found) if len(found) > 1 else self._alone


NO_BAD_WORDS = BadWords((), 0)


class SamplingTable:
    """Sampling parameters of every slot, laid out for fancy indexing by batch."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.temperature = np.ones(max_num_seqs, np.float64)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.repetition_penalty = np.ones(max_num_seqs, np.float64)
        self.presence_penalty = np.zeros(max_num_seqs, np.float64)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float64)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.named: list[IntArray] = [_NO_TOKENS] * max_num_seqs
        """Tokens reported instead of the most likely ones."""
        self.prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.penalized = np.zeros(max_num_seqs, np.bool_)
        self.biased = np.zeros(max_num_seqs, np.bool_)
        self.filtered = np.zeros(max_num_seqs, np.bool_)
        """Whether top-k, top-p or min-p exclude anything."""
        self.plain_greedy = np.zeros(max_num_seqs, np.bool_)
        """Whether plain argmax suffices."""
        self.bias: list[tuple[IntArray, npt.NDArray[np.float32]]] = [_NO_BIAS] * max_num_seqs
        self.restricted = np.zeros(max_num_seqs, np.bool_)
        self.allowed: list[IntArray] = [_NO_TOKENS] * max_num_seqs
        """The only tokens that can be sampled, where `restricted`."""
        self.has_bad_words = np.zeros(max_num_seqs, np.bool_)
        self.bad_words = [NO_BAD_WORDS] * max_num_seqs
        self._newest_words: tuple[tuple[tuple[int, ...], ...], BadWords] = ((), NO_BAD_WORDS)
        self.ending: list[IntArray] = [_NO_TOKENS] * max_num_seqs
        """Tokens that cannot be sampled before `min_tokens`."""

    def set(self, slot: int, params: SamplingParams) -> None:
        """Replace the parameters of a slot. Token ids outside the vocabulary are dropped."""
        self.seed[slot] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.named[slot] = self._inside(params.logprob_token_ids)
        self.prompt_logprobs[slot] = (
            NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        )
        penalties = (params.presence_penalty, params.frequency_penalty)
        self.penalized[slot] = params.repetition_penalty != 1.0 or any(penalties)
        self.bias[slot] = bias = self._bias(params.logit_bias)
        self.biased[slot] = len(bias[0]) > 0
        self.allowed[slot] = allowed = self._inside(params.allowed_token_ids or ())
        self.restricted[slot] = len(allowed) > 0
        self.bad_words[slot] = self._words(params.bad_words)
        self.has_bad_words[slot] = bool(self.bad_words[slot])
        self.filtered[slot] = (
            0 < params.top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        )
        stops = params.stop_token_ids + (() if params.ignore_eos else self._eos)
        self.ending[slot] = self._inside(sorted(set(stops)))
        self.plain_greedy[slot] = params.temperature == 0.0 and not (
            self.penalized[slot]
            or self.biased[slot]
            or self.restricted[slot]
            or self.has_bad_words[slot]
            or params.min_tokens > 0
            or params.logprobs is not None
        )

    def _inside(self, token_ids: Sequence[int]) -> IntArray:
        """Return the token ids inside the vocabulary."""
        if not token_ids:  # true for most requests
            return _NO_TOKENS
        ids = np.array(token_ids, np.int64)
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def _bias(self, bias: dict[int, float]) -> tuple[IntArray, npt.NDArray[np.float32]]:
        if not bias:
            return _NO_BIAS
        token_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        added = np.fromiter(bias.values(), np.float32, len(bias))
        inside = (token_ids >= 0) & (token_ids < self._vocab_size)
        return token_ids[inside], added[inside]

    def _words(self, words: tuple[tuple[int, ...], ...]) -> BadWords:
        """Return an index of words; reuses the last one, as sequences of a request share words."""
        if not words:
            return NO_BAD_WORDS
        if words != self._newest_words[0]:
            self._newest_words = words, BadWords(words, self._vocab_size)
        return self._newest_words[1]


_NO_TOKENS: IntArray = np.zeros(0, np.int64)
_NO_BIAS = (_NO_TOKENS, np.zeros(0, np.float32))


class SlotTable:
    """Tokens, block tables and sampling parameters of all slots."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_groups: int = 1,
    ) -> None:
        """Allocate the arrays; each group of layers has separate block tables."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.adapters = np.full(max_num_seqs, -1, np.int64)
        """Adapter slot of each sequence; -1 for none."""
        blocks = -(-(max_model_len + 1) // block_size)
        tables = [np.zeros((max_num_seqs, blocks), np.int32) for _ in range(num_groups)]
        self.block_tables, *self.other_tables = tables
        """Of the first group of layers, and of the others."""
        self.sampling = SamplingTable(max_num_seqs, vocab_size, eos_token_ids)

    def start(self, start: SlotStart) -> None:
        """Assign a slot to a sequence.

        Raises:
            ValueError: a token id is not in the vocabulary, or there are too many tokens.
        """
        tokens = np.array(start.token_ids, np.int64)
        if len(tokens) >= self.token_ids.shape[1]:
            raise ValueError(
                f"a sequence of {len(tokens)} tokens is longer than the "
                f"{self.token_ids.shape[1] - 1} that the model takes"
            )
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self.vocab_size}")
        self.token_ids[start.slot, : len(tokens)] = tokens
        self.num_prompt_tokens[start.slot] = start.num_prompt_tokens
        self.adapters[start.slot] = start.adapter
        self.sampling.set(start.slot, start.sampling)

    def append_blocks(self, blocks: SlotBlocks) -> None:
        """Extend the block table of a slot."""
        end = blocks.first + len(blocks.block_ids)
        table = self.other_tables[blocks.group - 1] if blocks.group else self.block_tables
        table[blocks.slot, blocks.first : end] = blocks.block_ids
