"""Random draft heads for tiny models in published formats, and reference formulas."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from engine.batch.batch import BatchPlan
from engine.models.heads.head import DraftHead
from engine.runner.draft_head import HeadDrafts
from engine.shared.messages import AddRequest
from tests.engine.serving import SOME_TEXT, request
from tests.engine.tiny_models import Checkpoint, randomize, save_tiny_model

_LLAMA: Any = modeling_llama
_NUM_TAPPED = 3
_HEADS = (4, 2, 16)
"""Heads, KV heads and their width."""


class Eagle3(torch.nn.Module):
    """An EAGLE-3 head, computed over whole sequences without a cache."""

    def __init__(self, config: LlamaConfig, draft_vocab: int, *, before_residual: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.before_residual = before_residual
        heads, kv_heads, dim = _HEADS

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False)

        self.fc = linear(_NUM_TAPPED * hidden, hidden)
        self.layer = torch.nn.ModuleDict(
            {
                "input_layernorm": _LLAMA.LlamaRMSNorm(hidden, config.rms_norm_eps),
                "hidden_norm": _LLAMA.LlamaRMSNorm(hidden, config.rms_norm_eps),
                "post_attention_layernorm": _LLAMA.LlamaRMSNorm(hidden, config.rms_norm_eps),
                "self_attn": torch.nn.ModuleDict(
                    {
                        "q_proj": linear(2 * hidden, heads * dim),
                        "k_proj": linear(2 * hidden, kv_heads * dim),
                        "v_proj": linear(2 * hidden, kv_heads * dim),
                        "o_proj": linear(heads * dim, hidden),
                    }
                ),
                "mlp": _LLAMA.LlamaMLP(config),
            }
        )
        self.norm = _LLAMA.LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = linear(hidden, draft_vocab)
        self.rotary = _LLAMA.LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return what comes out of the layer, of tokens [tokens, hidden] and states before them."""
        normed = self.layer["hidden_norm"](states)
        residual = normed if self.before_residual else states
        both = torch.cat((self.layer["input_layernorm"](embedded), normed), dim=-1)
        x = residual + self._attention(both)
        added: torch.Tensor = self.layer["mlp"](self.layer["post_attention_layernorm"](x))
        return x + added

    def _attention(self, both: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = _HEADS
        attention: Any = self.layer["self_attn"]
        cos, sin = self.rotary(both, torch.arange(len(both)).unsqueeze(0))

        def split(name: str, count: int) -> torch.Tensor:
            projected: torch.Tensor = attention[name](both)
            return projected.view(1, len(both), count, dim).transpose(1, 2)

        query, key = _LLAMA.apply_rotary_pos_emb(
            split("q_proj", heads), split("k_proj", kv_heads), cos, sin
        )
        value = split("v_proj", kv_heads)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: torch.Tensor = attention["o_proj"](out.transpose(1, 2).reshape(len(both), -1))
        return result


class Reference:
    """A saved head with its target model."""

    def __init__(self, target: Checkpoint, directory: Path) -> None:
        self.directory = directory
        self.target = target

    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Return the head's input embeddings of these tokens, [tokens, hidden]."""
        raise NotImplementedError

    def compute(
        self, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and carried states, of tokens from the second on and states before them."""
        raise NotImplementedError

    @torch.inference_mode()
    def drafts(
        self, token_ids: list[int], count: int, bias: dict[int, float] | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """Return the head's greedy continuation of these tokens, and the first token's logits.

        Args:
            bias: added to the logits of some tokens.
        """
        states = self.states(token_ids)[:-1]
        tokens, drafted, first = torch.tensor(token_ids[1:]), list[int](), torch.zeros(0)
        for _ in range(count):
            logits, carried = self.compute(self.embed(tokens), states)
            last = logits[-1].clone()
            if not drafted:
                first = logits[-1]
            for token_id, added in (bias or {}).items():
                last[token_id] += added
            drafted.append(int(last.argmax()))
            tokens = torch.cat((tokens, torch.tensor(drafted[-1:])))
            states = torch.cat((states, carried[-1:]))
        return drafted, first

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the model's embeddings."""
        embedded: torch.Tensor = self.target.reference.model.embed_tokens(tokens)
        return embedded


class Eagle3Reference(Reference):
    """A saved EAGLE-3 head."""

    def __init__(
        self, target: Checkpoint, directory: Path, head: Eagle3, tokens: list[int], prefix: str
    ) -> None:
        super().__init__(target, directory)
        self.head = head
        self.tokens = tokens
        self._prefix = prefix
        self.tapped: list[int] = []

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Return states between layers, joined."""
        model = self.target.reference.model
        out = model(torch.tensor([token_ids]), output_hidden_states=True)
        taken = [out.hidden_states[layer][0] for layer in self.tapped]
        joined: torch.Tensor = self.head.fc(torch.cat(taken, dim=-1))
        return joined

    def compute(
        self, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the head; tokens that it never drafts get no logit."""
        out = self.head(embedded, states)
        logits = self.head.lm_head(self.head.norm(out))
        spread = torch.full(
            (len(out), self.target.reference.config.get_text_config().vocab_size), float("-inf")
        )
        spread[:, self.tokens] = logits
        return spread, out

    def save(self) -> None:
        """Write its tensors."""
        tensors = {
            name.replace("layer.", self._prefix, 1) if name.startswith("layer.") else name: tensor
            for name, tensor in self.head.state_dict().items()
            if "rotary" not in name
        }
        tokens = torch.tensor(self.tokens)
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        vocabulary = self.target.reference.config.get_text_config().vocab_size
        tensors["t2d"] = torch.isin(torch.arange(vocabulary), tokens)
        save_file(tensors, self.directory / "model.safetensors")


def save_eagle3(
    target: Checkpoint,
    directory: Path,
    *,
    layer_ids: list[int],
    seed: int = 0,
    draft_tokens: list[int] | None = None,
    before_residual: bool = False,
    prefix: str = "midlayer.",
    as_speculator: bool = False,
) -> Eagle3Reference:
    """Write a random head for a model; it drafts some tokens, or all."""
    served = target.reference.config.get_text_config()
    config = LlamaConfig(
        hidden_size=served.hidden_size,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=_HEADS[0],
        num_key_value_heads=_HEADS[1],
        head_dim=_HEADS[2],
        vocab_size=served.vocab_size,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    tokens = draft_tokens or list(range(served.vocab_size))
    head = Eagle3(config, len(tokens), before_residual=before_residual).eval()
    randomize(head, seed)
    reference = Eagle3Reference(target, directory, head, tokens, prefix)
    reference.save()
    own = {"draft_vocab_size": len(tokens), "norm_before_residual": before_residual}
    content: dict[str, Any] = {
        **config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"], **own
    }  # fmt: skip
    if as_speculator:
        content = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": config.to_dict(),
            **own,
        }
    content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layer_ids}
    reference.tapped = [number + (layer_ids[0] == 1) for number in layer_ids]
    (directory / "config.json").write_text(json.dumps(content))
    return reference


class MtpReference(Reference):
    """A checkpoint whose last layer is a multi-token prediction layer."""

    def __init__(
        self, target: Checkpoint, layer: Any, parts: dict[str, torch.Tensor], *, normed: bool
    ) -> None:
        super().__init__(target, target.directory)
        self._layer = layer
        self._parts = parts
        self._normed = normed

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Return the states that logits are made of."""
        states: torch.Tensor = self.target.reference.model(torch.tensor([token_ids]))[0][0]
        return states

    def compute(
        self, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer."""
        model = self.target.reference.model
        joined = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", states)), dim=-1)
        x = F.linear(joined, self._parts["eh_proj"]).unsqueeze(0)
        positions = torch.arange(len(embedded)).unsqueeze(0)
        rotated = model.rotary_emb(x, position_ids=positions)
        out = self._layer(
            x, attention_mask=None, position_ids=positions, position_embeddings=rotated
        )
        x = out[0] if isinstance(out, tuple) else out
        normed = self._norm("shared_head.norm", x[0])
        return F.linear(normed, self._parts["shared_head.head"]), normed if self._normed else x[0]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.target.reference.config.rms_norm_eps
        return F.rms_norm(x, x.shape[-1:], self._parts[name], eps)


def save_mtp(
    name: str, directory: Path, *, normed: bool, own_head: bool = True, copies: bool = True
) -> MtpReference:
    """Write a tiny model whose last layer is a multi-token prediction layer.

    Args:
        normed: whether the layer goes on from its own state normalized.
        own_head: whether it has its own LM head instead of the model's.
        copies: whether the checkpoint stores a second copy of tensors shared with the model.
    """
    saved = save_tiny_model(name, directory, seed=5)
    model, config = saved.reference.model, directory / "config.json"
    number, hidden = len(model.layers) - 1, model.config.hidden_size
    layer = model.layers[number]
    model.layers = model.layers[:number]
    model.config.num_hidden_layers = number
    content = json.loads(config.read_text())
    content |= {"num_hidden_layers": number, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(content))
    random = torch.Generator().manual_seed(11)
    head = saved.reference.lm_head.weight.detach()
    parts = {
        **{each: 1 + 0.1 * torch.randn(hidden, generator=random) for each in _MTP_NORMS},
        "eh_proj": 0.3 * torch.randn(hidden, 2 * hidden, generator=random),
        "shared_head.head": 0.3 * torch.randn(head.shape, generator=random) if own_head else head,
    }
    stored = dict(parts)
    if copies:
        stored["embed_tokens"] = model.embed_tokens.weight.detach()
    elif not own_head:
        del stored["shared_head.head"]
    path, prefix = directory / "model.safetensors", f"model.layers.{number}."
    tensors = {f"{prefix}{each}.weight": part.clone() for each, part in stored.items()}
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return MtpReference(saved, layer, parts, normed=normed)


_MTP_NORMS = ("enorm", "hnorm", "shared_head.norm")


class Proposal(NamedTuple):
    """Tokens proposed after a prefix of one sequence."""

    after: list[int]
    drafted: list[int]


class Proposals:
    """All proposals of heads in this test."""

    def __init__(self) -> None:
        self.made: list[Proposal] = []
        self.logits: list[torch.Tensor] = []

    def check(self, reference: Reference, bias: dict[int, float] | None = None) -> None:
        """Compare some of them with the formula applied to the sequence alone."""
        assert self.made
        for after, drafted in self.made[:: 1 + len(self.made) // 40]:
            assert reference.drafts(after, len(drafted), bias)[0] == drafted, len(after)


def note_proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """Record the proposals of heads from now on."""
    found = Proposals()
    propose, predict = HeadDrafts.propose, DraftHead.predict

    def noted(self: HeadDrafts, plan: BatchPlan) -> BatchPlan:
        drafted = propose(self, plan)
        for row, tokens in drafted.proposed.items():
            known = self._table.token_ids[plan.slots[row], : plan.starts[row] + 1]
            found.made.append(Proposal(known.tolist(), tokens))
        return drafted

    def kept(self: DraftHead, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, carried = predict(self, out)
        found.logits.append(logits.clone())
        return logits, carried

    monkeypatch.setattr(HeadDrafts, "propose", noted)
    monkeypatch.setattr(DraftHead, "predict", kept)
    return found


def greedy_requests(bias: dict[int, float]) -> list[AddRequest]:
    """Return prompts of 9 to 109 tokens, some with common prefixes."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 25, "logit_bias": bias}
    return [
        request(id, (SOME_TEXT * 3)[: 9 + 14 * id] + [id] * (id % 3), **sampling) for id in range(8)
    ]
