"""Batches of training tokens, drawn at random but the same in every run of a seed."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .text import chat_documents, plain_documents, split_speeches


class Stream:
    """Tokens of one kind of text, and where windows may start."""

    def __init__(self, documents: Iterator[str], tokenizer: Tokenizer) -> None:
        encoded = [item.ids for item in tokenizer.encode_batch(list(documents))]
        self.tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in encoded])
        self.starts = np.cumsum([0, *map(len, encoded[:-1])])

    def window(self, length: int, start: int) -> np.ndarray:
        """Return ``length`` tokens from ``start``, going on at the beginning after the end."""
        return np.take(self.tokens, np.arange(start, start + length), mode="wrap")


class Batches:
    """Random windows of the training text; the batch of a step depends on seed and step only."""

    # The cuts into scenes and dialogues are drawn anew after this many steps.
    RENEW_STEPS = 100

    def __init__(self, text: str, tokenizer: Tokenizer, seed: int, chat_share: float) -> None:
        self.speeches = split_speeches(text)
        self.tokenizer = tokenizer
        self.seed, self.chat_share = seed, chat_share
        self.drawn = -1
        self.plain: Stream | None = None
        self.chat: Stream | None = None
        self.heads = np.empty(0, dtype=np.int64)

    def _renew(self, draw: int) -> tuple[Stream, Stream]:
        if self.plain is None or self.chat is None or draw != self.drawn:
            rng = random.Random(f"documents {self.seed} {draw}")
            self.plain = Stream(plain_documents(self.speeches, rng), self.tokenizer)
            self.chat = Stream(chat_documents(self.speeches, rng), self.tokenizer)
            newline = self.tokenizer.token_to_id("Ċ")
            blank = (self.plain.tokens[:-1] == newline) & (self.plain.tokens[1:] == newline)
            self.heads = np.concatenate((self.plain.starts, np.flatnonzero(blank) + 2))
            self.drawn = draw
        return self.plain, self.chat

    def batch(self, step: int, rows: int, length: int) -> Tensor:
        """Return tokens [rows, length + 1]: inputs and, shifted by one, targets."""
        plain, chat = self._renew(step // self.RENEW_STEPS)
        rng = np.random.default_rng((self.seed, step))
        windows = []
        for _ in range(rows):
            stream, heads = (
                (chat, chat.starts) if rng.random() < self.chat_share else (plain, self.heads)
            )
            # Prompts begin with a speaker's name or a turn, so half of the windows do as well.
            at_head = rng.random() < 0.5
            start = rng.choice(heads) if at_head else rng.integers(len(stream.tokens))
            windows.append(stream.window(length + 1, int(start)))
        return torch.from_numpy(np.stack(windows))
