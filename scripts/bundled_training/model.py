"""The arithmetic of Qwen3MoeForCausalLM, with dropout and with the experts stacked."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shape import Shape


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
