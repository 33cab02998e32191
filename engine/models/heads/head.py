"""A draft head as the runner sees it, whichever way it was trained."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.attention.kv_format import KvFormat
from engine.models.decoder import Decoder
from engine.models.module import Module, Rows
from engine.models.spec import ModelSpec
from engine.models.step import StepTokens, Taps

_UNLIKELY = -1e30
"""Logit of tokens that a head cannot propose: finite, so that rows of nothing else have a sum."""

Entry = Callable[[Tensor, Tensor], Tensor]
"""From embeddings and states, both [tokens, hidden], to what enters a head's layer."""


class DraftVocabulary(Module):
    """The tokens that a head can propose, where those are not all."""

    token_ids: Tensor

    def __init__(self, token_ids: Tensor, size: int) -> None:
        """Take the token [tokens] of each of the head's logits, and the size of the vocabulary."""
        super().__init__()
        self.register_buffer("token_ids", token_ids)
        self._size = size

    def forward(self, logits: Tensor) -> Tensor:
        """Spread logits [rows, tokens] over the whole vocabulary: [rows, vocab] in float32."""
        spread = logits.new_full((len(logits), self._size), _UNLIKELY, dtype=torch.float32)
        return spread.index_copy_(1, self.token_ids, logits.float())


class DraftHead(Module, finds_hooks=True):
    """One decoder layer between the states of a model and logits of its tokens.

    It takes a token with the state of the position before it, and predicts the token after both.
    What it carries to the next position stands for the state there, until the model has computed
    that.
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
        """Take the parts.

        Args:
            block: the layer, without embedding, norm and LM head.
            embed: from token ids to embeddings.
            project: from what the model gives of a token, to a state of the head's width.
            enter: to what enters the layer.
            norm: of what comes out, before `lm_head`.
            lm_head: to logits of all tokens.
            tapped: after how many layers the model's states are taken, side by side; without any
                they are those that it makes logits of.
            carries_normed: whether the state that is carried on is normalized.
            num_logits: tokens that it can propose, if not all.
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
        """Tokens that it can propose."""

    @property
    def spec(self) -> ModelSpec:
        """Of its layer."""
        return self.block.spec

    @property
    def kv_format(self) -> KvFormat:
        """Of its KV cache."""
        return self.block.kv_format

    @property
    def state_bytes(self) -> int:
        """Memory of one state."""
        return self.spec.hidden_size * self.block.dtype.itemsize

    @property
    def is_tapping(self) -> bool:
        """Whether it takes states between layers of the model, and not the final ones."""
        return bool(self._tapped)

    def new_taps(self) -> Taps:
        """Return what collects the model's states in one step."""
        return Taps(self._tapped)

    def forward(self, step: StepTokens, states: Tensor, cache: list[Tensor]) -> Tensor:
        """Compute tokens with the states before them, [tokens, hidden]; return what comes out.

        The cache gets their keys and values. What comes out is of the step's final tokens.
        """
        entering = self.enter(self.embed(step.token_ids), states)
        out: Tensor = self.block(step, cache, entering)
        return out

    def predict(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [rows, vocab] of what came out, and the states that are carried on."""
        normed = self.norm(out)
        return self.lm_head(normed), normed if self._carries_normed else out
