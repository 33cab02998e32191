"""The runner's interface to draft heads of any kind."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.attention.kv_format import KvFormat
from engine.models.decoder import Decoder
from engine.models.module import Module, Rows
from engine.models.spec import ModelSpec
from engine.models.step import StepTokens, Taps

_UNLIKELY = -1e30
"""Logit of tokens that a head cannot propose; finite, so that a softmax over only these is
defined."""

Entry = Callable[[Tensor, Tensor], Tensor]
"""Maps embeddings and states, both [tokens, hidden], to the input of a head's layer."""


class DraftVocabulary(Module):
    """Maps the logits of a head with a reduced vocabulary to all tokens."""

    token_ids: Tensor

    def __init__(self, token_ids: Tensor, size: int) -> None:
        """Initialize from the token id of each of the head's logits, and the vocabulary size."""
        super().__init__()
        self.register_buffer("token_ids", token_ids)
        self._size = size

    def forward(self, logits: Tensor) -> Tensor:
        """Scatter logits [rows, tokens] over the whole vocabulary: [rows, vocab] in float32."""
        spread = logits.new_full((len(logits), self._size), _UNLIKELY, dtype=torch.float32)
        return spread.index_copy_(1, self.token_ids, logits.float())


class DraftHead(Module, finds_hooks=True):
    """One decoder layer between a model's states and logits of draft tokens.

    It takes a token with the state of the previous position and predicts the next token. Its output
    stands in for the state of the next position until the model has computed it.
    """

    def __init__(
        self,
        block: Decoder,
        *,
        embed: Rows,
        project: Rows,
        enter: Entry,
        norm: Rows,
        lm_head: Rows,
        tapped: tuple[int, ...] = (),
        carries_normed: bool = False,
        num_logits: int | None = None,
    ) -> None:
        """Initialize from the layers.

        Args:
            block: the decoder layer, without embedding, norm and LM head.
            embed: maps token ids to embeddings.
            project: maps the model's state of a token to the head's width.
            enter: computes the layer's input.
            norm: applied to the layer's output before `lm_head`.
            lm_head: computes logits of all tokens.
            tapped: numbers of layers after which the model's states are taken and concatenated;
                empty for the final states.
            carries_normed: whether the state carried on is normalized.
            num_logits: number of tokens that can be proposed; default: all.
        """
        super().__init__()
        self.block = block
        self.project = project
        self.embed = embed
        self.enter = enter
        self.norm = norm
        self.lm_head = lm_head
        self._tapped = tapped
        self._carries_normed = carries_normed
        self.num_logits = num_logits or block.spec.vocab_size
        """Number of tokens that can be proposed."""

    @property
    def spec(self) -> ModelSpec:
        """Spec of its layer."""
        return self.block.spec

    @property
    def kv_format(self) -> KvFormat:
        """Format of its KV cache."""
        return self.block.kv_format

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self.spec.hidden_size * self.block.dtype.itemsize

    @property
    def is_tapping(self) -> bool:
        """Whether it takes states between layers of the model instead of the final ones."""
        return bool(self._tapped)

    def new_taps(self) -> Taps:
        """Return a collector for the model's states in one step."""
        return Taps(self._tapped)

    def forward(self, step: StepTokens, states: Tensor, cache: list[Tensor]) -> Tensor:
        """Compute tokens with previous states [tokens, hidden]; return final tokens' outputs.

        Writes the tokens' keys and values to the cache.
        """
        entering = self.enter(self.embed(step.token_ids), states)
        out: Tensor = self.block(step, cache, entering)
        return out

    def predict(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [rows, vocab] of outputs, and the states to carry on."""
        normed = self.norm(out)
        return self.lm_head(normed), normed if self._carries_normed else out
