"""Measures the model on held-out text, and lets it write samples."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from .chat_format import END_OF_TEXT, TURN_END
from .model import LanguageModel


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOut:
    """How well the model predicts text that it has not seen."""

    nats_per_token: float
    bits_per_byte: float
    shares: list[list[float]]  # of the tokens, [layers][experts]


@torch.inference_mode()
def evaluate(model: LanguageModel, tokenizer: Tokenizer, text: str) -> HeldOut:
    """Measure the model on ``text`` in windows as long as the model allows, without overlap."""
    was_training = model.training
    model.eval()
    ids = torch.tensor(tokenizer.encode(text).ids)
    length = model.shape.max_position_embeddings
    total, counted = 0.0, 0
    shares = torch.zeros(model.shape.num_hidden_layers, model.shape.num_experts)
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length + 1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, _, share = model(window[None, :-1])
        total += F.cross_entropy(logits[0].float(), window[1:], reduction="sum").item()
        counted += len(window) - 1
        shares += share * (len(window) - 1)
    model.train(was_training)
    size = len(text.encode()) - len(tokenizer.decode([int(ids[0])]).encode())
    return HeldOut(
        total / counted, total / size / math.log(2), (shares / counted).round(decimals=4).tolist()
    )


@torch.inference_mode()
def sample(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 160,
    temperature: float = 0.7,
    seed: int = 1,
) -> str:
    """Return what the model writes after ``prompt``, up to an end token."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    stops = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)}
    for _ in range(tokens):
        logits = model(torch.tensor([ids]))[0][0, -1].float()
        chances = (logits / temperature).softmax(dim=-1)
        ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        if ids[-1] in stops:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=False)
