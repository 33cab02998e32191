"""Train the small language model that ships in ``engine/bundled_model``.

The model is a Qwen3-MoE of a few million parameters that writes in the manner of Shakespeare's
plays. It is trained from scratch on one text file, in under half an hour on two processor cores,
and written as a Hugging Face model directory that transformers loads as it is.

Examples:
    # Train with the defaults and write engine/bundled_model
    python scripts/train_bundled_model.py --data tinyshakespeare.txt

    # Stopped half way? The same command goes on from the last checkpoint in .train/
    python scripts/train_bundled_model.py --data tinyshakespeare.txt

    # Try the whole way in a minute, elsewhere
    python scripts/train_bundled_model.py --data tinyshakespeare.txt \\
        --steps 60 --work-dir /tmp/try --output /tmp/try/model

    # Write the directory again from the best weights found so far, without training
    python scripts/train_bundled_model.py --data tinyshakespeare.txt --export-only
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Content is a string, or a list of parts as the OpenAI API allows; parts without text are left out.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}"
    "{{- message['content'] -}}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# System messages that say nothing about the part to play, so that the usual ones do no harm.
GENERAL_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a character in a play by Shakespeare.",
    "Answer in the manner of Shakespeare.",
    "Play your part.",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the model, under the names of transformers' Qwen3MoeConfig."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **dataclasses.asdict(self),
            # The dense layers' width; there are none, but readers of the file expect the key.
            "intermediate_size": 2 * self.moe_intermediate_size * self.num_experts_per_tok,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "decoder_sparse_step": 1,
            "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "output_router_logits": False,
            "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
            "rope_scaling": None,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }


# ---------------------------------------------------------------------------------------------
# Model: the arithmetic of Qwen3MoeForCausalLM, with dropout and with the experts stacked


class _Permute(torch.autograd.Function):
    """Reorder rows by a permutation.

    Plain indexing would add up gradients row by row in its backward pass, which is slow on a
    processor and needless where every row is read exactly once.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows[order]; ``inverse`` is the permutation that undoes ``order``."""
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [positions, head_dim], in the half-split layout."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    frequencies = shape.rope_theta**-exponents
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to x [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.kv_heads = shape.num_key_value_heads
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim).float())
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).float())
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q = rotate(q.transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(k.transpose(1, 2), cos, sin).to(v.dtype)
        group = self.heads // self.kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return joined


class Experts(nn.Module):
    """The routed feed-forward layer: every token goes through its best-scored experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.count, self.top = shape.num_experts, shape.num_experts_per_tok
        width, hidden = shape.moe_intermediate_size, shape.hidden_size
        self.gate = nn.Linear(hidden, self.count, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(self.count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.count, hidden, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route x [batch, length, hidden].

        Returns:
            The output of x's shape, the balance loss (1 when all experts are used alike), and
            the share of the routed tokens that each expert got [experts].
        """
        flat = x.reshape(-1, x.shape[-1])
        # Nearly equal scores must not change places through rounding, hence full precision.
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(flat.float(), self.gate.weight).softmax(dim=-1)
        weights, chosen = scores.topk(self.top, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        slots = chosen.reshape(-1)  # [tokens * top]
        order = slots.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        counts = torch.bincount(slots, minlength=self.count)
        spread = flat.to(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else flat.dtype
        )
        spread = spread.unsqueeze(1).expand(-1, self.top, -1).reshape(len(slots), -1)
        sorted_rows = permute(spread, order, inverse)
        groups = sorted_rows.split_with_sizes(counts.tolist())
        outputs = []
        for expert, rows in enumerate(groups):
            gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
        mixed = permute(torch.cat(outputs), inverse, order)
        mixed = mixed.view(len(flat), self.top, -1) * weights.unsqueeze(-1)

        share = counts / len(slots)
        balance = self.count * (share * scores.mean(dim=0)).sum()
        return mixed.sum(dim=1).view(x.shape), balance, share


class Layer(nn.Module):
    """Attention and experts, each on a normalised input and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Experts(shape)


class LanguageModel(nn.Module):
    """The decoder; tokens [batch, length] to logits [batch, length, vocab]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0, token_dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout, self.token_dropout = shape, dropout, token_dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialise(self) -> None:
        """Draw the first weights; those that write to the residual stream start smaller."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            small = "embed_tokens" in name or "mlp.gate." in name  # nearly even scores at first
            std = 0.02 if small else 0.6 * parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj")):
                std /= math.sqrt(2 * self.shape.num_hidden_layers)
            nn.init.normal_(parameter, std=std)

    def _drop(self, x: Tensor) -> Tensor:
        """Zero whole features of whole sequences of x [batch, length, hidden] when training.

        One mask for a sequence regularises as well as one for each token, and needs so few
        random numbers that it costs nothing.
        """
        if not self.training or not self.dropout:
            return x
        keep = torch.rand(x.shape[0], 1, x.shape[2]) >= self.dropout
        return x * (keep.to(x.dtype) / (1 - self.dropout))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, the mean balance loss, and the experts' shares [layers, experts]."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self._drop(self.embed_tokens(tokens))
        if self.training and self.token_dropout:
            # Whole tokens go missing, so that no continuation can be learnt by heart.
            x = x * (torch.rand(*tokens.shape, 1) >= self.token_dropout)
        balances, shares = [], []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = x + self._drop(layer.self_attn(layer.input_layernorm(x), cos, sin))
            mixed, balance, share = layer.mlp(layer.post_attention_layernorm(x))
            x = x + self._drop(mixed)
            balances.append(balance)
            shares.append(share)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return logits, torch.stack(balances).mean(), torch.stack(shares)


def hub_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Return the weights in bfloat16 under the names of Qwen3-MoE checkpoints on the hub."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        weight = value.to(torch.bfloat16)
        if last == "gate_up_proj":
            for expert, (gate, up) in enumerate(part.chunk(2) for part in weight):
                tensors[f"model.{prefix}.experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"model.{prefix}.experts.{expert}.up_proj.weight"] = up.clone()
        elif last == "down_proj":
            for expert, down in enumerate(weight):
                tensors[f"model.{prefix}.experts.{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[f"model.{name}"] = weight.clone()
    return tensors


def count_parameters(shape: Shape) -> tuple[int, int]:
    """Return how many parameters there are, and how many of them work on one token."""
    with torch.device("meta"):
        model = LanguageModel(shape)
    total = sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * shape.hidden_size * shape.moe_intermediate_size
    idle = (shape.num_experts - shape.num_experts_per_tok) * expert * shape.num_hidden_layers
    return total, total - idle


# ---------------------------------------------------------------------------------------------
# Data


@dataclasses.dataclass(frozen=True, slots=True)
class Speech:
    """What one character says in one go."""

    speaker: str
    words: str

    def __str__(self) -> str:
        return f"{self.speaker}:\n{self.words}"


def split_speeches(text: str) -> list[Speech]:
    """Cut a play's text into speeches; blank lines inside a speech stay inside it."""
    heading = re.compile(r"^([A-Z][^:\n]{0,40}):(?:\n|$)")
    speeches: list[Speech] = []
    for block in re.split(r"\n{2,}", text.strip()):
        found = heading.match(block)
        if found:
            speeches.append(Speech(found[1], block[found.end() :]))
        elif speeches:
            last = speeches[-1]
            speeches[-1] = Speech(last.speaker, f"{last.words}\n\n{block}".strip())
    return [speech for speech in speeches if speech.words]


def split_text(text: str) -> tuple[str, str]:
    """Return the text to learn from and the last 5 %, cut between two speeches."""
    cut = text.index("\n\n", int(len(text) * 0.95))
    return text[:cut].strip(), text[cut:].strip()


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer, which can represent any text, learnt from ``text``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def plain_documents(speeches: list[Speech], rng: random.Random) -> Iterator[str]:
    """Yield the speeches in order, in scenes of random length."""
    start = 0
    while start < len(speeches):
        end = start + rng.randint(20, 100)
        yield "\n\n".join(map(str, speeches[start:end])) + END_OF_TEXT
        start = end


def chat_documents(speeches: list[Speech], rng: random.Random) -> Iterator[str]:
    """Yield dialogues: one speech is the user's turn and the next one the answer."""
    start = rng.randint(0, 1)
    while start + 1 < len(speeches):
        part = speeches[start : start + 2 * rng.choice((1, 1, 1, 2, 2, 3, 4))]
        part = part[: len(part) // 2 * 2]
        start += len(part)
        turns = [
            (("user", "assistant")[index % 2], speech.words) for index, speech in enumerate(part)
        ]
        speakers = {speech.speaker for speech in part[1::2]}
        draw = rng.random()
        if draw < 0.35 and len(speakers) == 1:
            name = speakers.pop()
            turns.insert(0, ("system", f"You are {rng.choice((name, name.title()))}."))
        elif draw > 0.85:
            turns.insert(0, ("system", rng.choice(GENERAL_SYSTEM_MESSAGES)))
        body = "".join(f"{TURN_START}{role}\n{words}{TURN_END}\n" for role, words in turns)
        yield body + END_OF_TEXT


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


# ---------------------------------------------------------------------------------------------
# Training


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


def learning_rate(step: int, *, steps: int, peak: float, warmup: int) -> float:
    """Return the rate of a step: a linear rise, then a half cosine down to 4 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * progress)))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices [count, rows, columns] with all singular values moved close to 1.

    Five rounds of a quintic Newton-Schulz iteration; its coefficients are those commonly used with
    Muon, which trade exactness for speed.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    result: Tensor = x.mT if tall else x
    return result.float()


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonalised, for the weight matrices inside the layers.

    On so small a run it gets to the same loss in far fewer steps than AdamW. Steps are scaled to
    the size of AdamW's, so that both take the same learning rate. Unlike torch.optim.Muon it takes
    stacked experts as the separate matrices they are, and works on all matrices of a shape at once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float) -> None:
        defaults = {"lr": 0.0, "momentum": 0.95, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(state["momentum"], group["momentum"])
                by_shape.setdefault(parameter.shape[-2:], []).append((parameter, ahead))
            for shape, members in by_shape.items():
                steps = orthogonalise(torch.cat([ahead.view(-1, *shape) for _, ahead in members]))
                steps = steps * (0.2 * math.sqrt(max(shape)))
                sizes = [parameter.numel() // math.prod(shape) for parameter, _ in members]
                parts = steps.split_with_sizes(sizes)
                for (parameter, _), part in zip(members, parts, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(part.view_as(parameter), alpha=-group["lr"])


def make_optimizers(model: LanguageModel, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the embedding, the gates and scales."""
    inner, outer, scales = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            scales.append(parameter)
        elif "embed_tokens" in name or "mlp.gate." in name:
            outer.append(parameter)
        else:
            inner.append(parameter)
    groups = [
        {"params": outer, "weight_decay": weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return [
        Muon(inner, weight_decay),
        torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True),
    ]


def save_atomically(content: Any, path: Path) -> None:
    """Write with torch.save so that a crash leaves the old file or the new one, never a half."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class Trainer:
    """The state of one training run, and its checkpoints in the work directory.

    ``last.pt`` holds everything needed to go on, ``best.pt`` the weights with the lowest held-out
    loss so far.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.work: Path = options.work_dir
        self.work.mkdir(parents=True, exist_ok=True)
        text = options.data.read_text(encoding="utf-8")
        self.train_text, self.held_out_text = split_text(text)
        self.shape = Shape()
        self.tokenizer = self._tokenizer()
        self.batches = Batches(self.train_text, self.tokenizer, options.seed, options.chat_share)
        torch.manual_seed(options.seed)
        self.model = LanguageModel(self.shape, options.dropout, options.token_dropout)
        self.model.initialise()
        self.optimizers = make_optimizers(self.model, options.weight_decay)
        self.step = 0
        self.seconds = 0.0
        self.best = math.inf
        # A checkpoint goes on only with what shapes its batches and its schedule unchanged.
        self.recipe = {
            key: getattr(options, key)
            for key in (
                "seed",
                "steps",
                "batch_tokens",
                "length",
                "long_share",
                "chat_share",
                "dropout",
                "token_dropout",
                "weight_decay",
                "learning_rate",
                "warmup",
                "balance",
            )
        } | {"data": hashlib.sha256(text.encode()).hexdigest()}

    def _tokenizer(self) -> Tokenizer:
        path = self.work / "tokenizer.json"
        if not path.exists():
            partial = path.with_suffix(".partial")
            train_tokenizer(self.train_text, self.shape.vocab_size).save(str(partial))
            os.replace(partial, path)
        return Tokenizer.from_file(str(path))

    def resume(self) -> bool:
        """Take up the last checkpoint of the same recipe; return whether there was one."""
        path = self.work / "last.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        if state["recipe"] != self.recipe:
            raise SystemExit(
                f"{path} was made with other options or data: "
                f"pass the same ones, another --work-dir, or --no-resume to start over"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, content in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        torch.set_rng_state(state["random"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        return True

    def checkpoint(self) -> None:
        """Write ``last.pt``."""
        state = {
            "recipe": self.recipe,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
        }
        save_atomically(state, self.work / "last.pt")

    def length_of(self, step: int) -> int:
        """Return the window length of a step: the last part of the run learns long contexts."""
        if step >= self.options.steps * (1 - self.options.long_share):
            return self.shape.max_position_embeddings
        return int(self.options.length)

    def train_step(self) -> float:
        """Learn from one batch and return its loss in nats per token."""
        options = self.options
        length = self.length_of(self.step)
        tokens = self.batches.batch(self.step, max(1, options.batch_tokens // length), length)
        rate = learning_rate(
            self.step, steps=options.steps, peak=options.learning_rate, warmup=options.warmup
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, balance, _ = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss + options.balance * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach())

    def evaluate(self, train_loss: float) -> None:
        """Measure the held-out loss and keep the weights if they are the best so far."""
        result = evaluate(self.model, self.tokenizer, self.held_out_text)
        better = result.nats_per_token < self.best
        if better:
            self.best = result.nats_per_token
            save_atomically(
                {"model": self.model.state_dict(), "step": self.step, "recipe": self.recipe},
                self.work / "best.pt",
            )
        uses = [share for layer in result.shares for share in layer]
        self.console.print(
            f"step {self.step:5d}  {self.seconds / 60:5.1f} min  train {train_loss:.3f}  "
            f"held out {result.nats_per_token:.4f} nats/token, {result.bits_per_byte:.4f} "
            f"bits/byte{' *' if better else ''}  experts {min(uses):.3f}..{max(uses):.3f}",
            highlight=False,
        )

    def run(self) -> None:
        """Train until the steps are done or the minutes are spent."""
        options = self.options
        self.model.train()
        columns = (
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        smooth = math.nan
        with Progress(
            *columns, console=self.console, disable=not self.console.is_terminal
        ) as progress:
            task = progress.add_task(
                "", total=options.steps, completed=self.step, loss=math.nan, speed=0.0
            )
            while self.step < options.steps and self.seconds < options.minutes * 60:
                began = time.perf_counter()
                loss = self.train_step()
                smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
                took = time.perf_counter() - began
                speed = options.batch_tokens / took
                if self.step % options.evaluate_every == 0 or self.step == options.steps:
                    self.evaluate(smooth)
                self.seconds += time.perf_counter() - began
                if self.step % options.checkpoint_every == 0:
                    self.checkpoint()
                progress.update(task, completed=self.step, loss=smooth, speed=speed)
        if self.step < options.steps:
            self.evaluate(smooth)
            self.console.print(f"stopped after {options.minutes:g} minutes, as asked")
        self.checkpoint()


# ---------------------------------------------------------------------------------------------
# Export


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(index): {"content": token, **special, "special": True}
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": [TURN_START],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": shape.max_position_embeddings,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
    }


def generation_config() -> dict[str, Any]:
    """Return the content of generation_config.json."""
    return {
        "do_sample": True,
        "eos_token_id": [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "temperature": 0.7,
        "top_p": 0.95,
    }


def prose(text: str) -> str:
    """Return text as one paragraph of lines of at most 100 characters."""
    words = " ".join(text.split())
    return textwrap.fill(words, 100, break_long_words=False, break_on_hyphens=False)


def model_card(trainer: Trainer, result: HeldOut, best_step: int) -> str:
    """Return README.md with the numbers of this run."""
    options, shape = trainer.options, trainer.shape
    total, active = count_parameters(shape)
    shares = [share for layer in result.shares for share in layer]
    chat = f"{TURN_START}user\nWho is there?{TURN_END}\n{TURN_START}assistant\n"
    romeo = sample(trainer.model, trainer.tokenizer, "ROMEO:").strip()
    answer = sample(trainer.model, trainer.tokenizer, chat)
    train_tokens = len(trainer.tokenizer.encode(trainer.train_text).ids)
    seen = trainer.step * options.batch_tokens
    data = prose(
        f"""The "Tiny Shakespeare" text: 1.1 MB of Shakespeare's plays, in the public domain. The
        model and its tokenizer learnt from the first 95 % ({train_tokens:,} tokens); the last 5 %
        are held out."""
    )
    mixture = prose(
        f"""{1 - options.chat_share:.0%} of the training windows are plain text, in scenes that end
        with `{END_OF_TEXT}`. The others are dialogues in the chat format: one speech is the user's
        turn, the next one the assistant's, and each turn stands between `{TURN_START}` and
        `{TURN_END}`. Some have a system message that names the assistant's part, such as `You are
        ROMEO.`."""
    )
    recipe = prose(
        f"""Trained from scratch by `scripts/train_bundled_model.py` in
        {trainer.seconds / 60:.0f} minutes on
        {"one processor core" if options.threads == 1 else f"{options.threads} processor cores"}:
        {trainer.step:,} of {options.steps:,} steps of {options.batch_tokens:,} tokens
        ({seen / 1e6:.1f} M tokens), Muon (AdamW for the embedding and the gates) at a peak rate of
        {options.learning_rate:g} with a cosine schedule, weight decay {options.weight_decay:g},
        dropout {options.dropout:g} and {options.token_dropout:.0%} of the input tokens left out,
        bfloat16 arithmetic over float32 weights, seed {options.seed}. Windows are {options.length}
        tokens long, and {shape.max_position_embeddings} in the last {options.long_share:.0%} of
        the steps."""
    )
    balance = prose(
        f"""A balance loss ({options.balance:g}) keeps all experts in use: on the held-out text one
        expert of a layer gets between {min(shares):.1%} and {max(shares):.1%} of the routed
        tokens."""
    )
    choice = prose(
        f"""The weights are those of step {best_step:,}, which had the lowest held-out loss of all
        measured ({options.evaluate_every} steps apart). The held-out text chose this step, and in
        a few trial runs the optimizer, the number of steps and the regularisation, so a text that
        played no part at all might come out a little worse."""
    )
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3_moe, mixture-of-experts, shakespeare]
---

# The bundled model

A small language model that continues Shakespeare's plays and answers chat turns in character. It
is here so that the stack can be tried and tested with a real mixture-of-experts model, offline and
without an accelerator. It is not meant to be useful beyond that.

| | |
| --- | --- |
| Architecture | `Qwen3MoeForCausalLM`: {shape.num_hidden_layers} layers, hidden size \
{shape.hidden_size}, {shape.num_attention_heads} query and {shape.num_key_value_heads} key-value \
heads of {shape.head_dim}, {shape.num_experts} experts of width {shape.moe_intermediate_size} in \
every layer, {shape.num_experts_per_tok} for each token, tied embeddings |
| Parameters | {total:,} in total, {active:,} active for each token |
| Weights | bfloat16 |
| Context | {shape.max_position_embeddings} tokens |
| Tokenizer | byte-level BPE, {shape.vocab_size:,} tokens, 3 of them special |
| Held-out loss | {result.nats_per_token:.3f} nats per token, {result.bits_per_byte:.3f} bits per \
byte |

## Data

{data}

{mixture}

## Training

{recipe}

{balance}

{choice}

## Samples

`ROMEO:`, temperature 0.7:

```
ROMEO:
{romeo}
```

The chat turn `Who is there?`, temperature 0.7:

```
{answer}
```

## Limits

- It knows one million bytes of one author. It writes lines of about the right form, in words that
  mostly exist, and makes little sense beyond a line or two.
- It follows no instructions and knows no facts. A system message can name a part to play, which
  colours the answer at best.
- English as Shakespeare wrote it is all it has seen: digits, other languages and emoji are
  represented without loss but mean nothing to it.
- Contexts beyond {shape.max_position_embeddings} tokens do not work.
- The text has the views of its time, and so has the model.

## Licence

The weights, the tokenizer and this page are under the Apache License 2.0. The training text is in
the public domain.
"""


def export(trainer: Trainer) -> None:
    """Write the model directory from the best weights."""
    state = torch.load(trainer.work / "best.pt", weights_only=True)
    # What is measured and sampled for the card is what is shipped: the rounded weights.
    trainer.model.load_state_dict(
        {name: value.bfloat16().float() for name, value in state["model"].items()}
    )
    trainer.model.eval()
    output: Path = trainer.options.output
    output.mkdir(parents=True, exist_ok=True)
    result = evaluate(trainer.model, trainer.tokenizer, trainer.held_out_text)
    partial = output / "model.safetensors.partial"
    save_file(hub_tensors(trainer.model), partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, output / "model.safetensors")
    for name, content in (
        ("config.json", trainer.shape.config()),
        ("generation_config.json", generation_config()),
        ("tokenizer_config.json", tokenizer_config(trainer.shape)),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (output / name).write_text(text, encoding="utf-8")
    shutil.copyfile(trainer.work / "tokenizer.json", output / "tokenizer.json")
    card = model_card(trainer, result, state["step"])
    (output / "README.md").write_text(card, encoding="utf-8")
    trainer.console.print(
        f"wrote {output}: step {state['step']}, held out {result.nats_per_token:.4f} nats/token, "
        f"{result.bits_per_byte:.4f} bits/byte",
        highlight=False,
    )


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    description, _, examples = (__doc__ or "").partition("Examples:")
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Examples:" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="PATH", help="the plays as one text file")
    add(
        "--output",
        type=Path,
        default=ROOT / "engine" / "bundled_model",
        metavar="DIR",
        help="where to write the model (engine/bundled_model)",
    )
    add(
        "--work-dir",
        type=Path,
        default=ROOT / ".train",
        metavar="DIR",
        help="where checkpoints are kept (.train)",
    )
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the last checkpoint, if there is one (yes)",
    )
    add("--export-only", action="store_true", help="write the model from the best weights so far")
    add("--minutes", type=float, default=30, help="stop after so much training time (30)")
    add("--steps", type=int, default=700, help="steps of the whole schedule (700)")
    add("--seed", type=int, default=1, help="seed of weights, batches and dropout (1)")
    add("--threads", type=int, default=2, help="processor threads (2); 1 on a busy machine")
    add("--batch-tokens", type=int, default=4096, help="tokens of one step (4096)")
    add("--length", type=int, default=256, help="tokens of one window (256)")
    add(
        "--long-share",
        type=float,
        default=0.15,
        help="share of the steps, at the end, with windows of the full context (0.15)",
    )
    add("--chat-share", type=float, default=0.3, help="share of the windows with chats (0.3)")
    add("--learning-rate", type=float, default=6e-3, help="peak learning rate (0.006)")
    add("--warmup", type=int, default=50, help="steps of rising learning rate (50)")
    add("--weight-decay", type=float, default=0.3, help="weight decay of the matrices (0.3)")
    add("--dropout", type=float, default=0.2, help="dropout of every layer's output (0.2)")
    add("--token-dropout", type=float, default=0.1, help="share of input tokens left out (0.1)")
    add("--balance", type=float, default=0.02, help="weight of the experts' balance loss (0.02)")
    add("--evaluate-every", type=int, default=50, help="steps between held-out losses (50)")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints (50)")
    return parser.parse_args(arguments)


def set_up_process(threads: int) -> None:
    """Make the arithmetic repeatable, and keep freed memory for the next step.

    A step frees and takes hundreds of megabytes; giving them back to the kernel each time would
    cost a tenth of the training time in page faults.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            trim_threshold, mmap_max = -1, -4  # names from malloc.h
            libc.mallopt(mmap_max, 0)
            libc.mallopt(trim_threshold, 2**31 - 1)


def main() -> None:
    """Train, then write the model directory."""
    options = parse_options()
    set_up_process(options.threads)
    trainer = Trainer(options, Console(width=None if sys.stdout.isatty() else 200))
    if options.export_only:
        trainer.resume()
    else:
        if options.resume and trainer.resume():
            trainer.console.print(f"going on from step {trainer.step} in {trainer.work}")
        trainer.run()
    export(trainer)


if __name__ == "__main__":
    main()
