"""An EAGLE-3 head as it is trained: over whole sequences, with its own states fed back to it."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.attention.rotary import rotary_table, rotate, rotation
from engine.models.families.placing import llama_weights
from engine.models.formats.checkpoint import Checkpoint
from engine.models.spec import ModelSpec

_LAYER = "midlayer."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."


class TargetWeights:
    """The tensors of the model that is served, by the names that Llama's checkpoints have."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        """Take the files.

        Raises:
            ValueError: the model does not have Llama's tensors.
        """
        if spec.architecture != "LlamaForCausalLM":
            raise ValueError(
                f"heads are trained for models of Llama's form, not {spec.architecture}"
            )
        self._checkpoint = checkpoint
        self._names = {source.name: name for name, source in llama_weights(spec).items()}
        self.spec = spec

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in float32."""
        return self._checkpoint.tensor(self._names[name]).float().clone()

    def embedding(self) -> Tensor:
        """Return [vocab, hidden]."""
        return self.tensor("model.embed_tokens.weight")

    def lm_head(self) -> Tensor:
        """Return [vocab, hidden]."""
        return self.embedding() if self.spec.tie_word_embeddings else self.tensor("lm_head.weight")


def first_weights(target: TargetWeights) -> dict[str, Tensor]:
    """Return the weights that training begins with, by the names that they are stored under.

    They are those of the model's last layer, which sees the last of the tapped states as it did in
    the model; what attention makes of embeddings is as in the first layer.
    """
    hidden, last = target.spec.hidden_size, target.spec.num_layers - 1
    before, layer = "model.layers.0.", f"model.layers.{last}."
    identity = torch.cat((torch.zeros(hidden, 2 * hidden), torch.eye(hidden)), dim=1)
    weights = {
        "fc.weight": identity,
        "norm.weight": target.tensor("model.norm.weight"),
        _LAYER + "input_layernorm.weight": target.tensor(before + "input_layernorm.weight"),
        _LAYER + "hidden_norm.weight": target.tensor(layer + "input_layernorm.weight"),
    }
    same = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    for name in (*same, "post_attention_layernorm"):
        weights[f"{_LAYER}{name}.weight"] = target.tensor(f"{layer}{name}.weight")
    for name in "qkv":
        both = [target.tensor(f"{each}self_attn.{name}_proj.weight") for each in (before, layer)]
        weights[f"{_ATTENTION}{name}_proj.weight"] = torch.cat(both, dim=1)
    return weights


def saved_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights of a head that was trained before, to go on from there."""
    tensors = load_file(directory / "model.safetensors")
    return {name: each for name, each in tensors.items() if name not in ("lm_head.weight", "d2t")}


class HeadModule:
    """A head that drafts several tokens after every position of sequences at once."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], *, longest: int) -> None:
        """Take what the model is, the head's weights, and the length of the longest sequence."""
        self.weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        self._spec = spec
        rope = spec.distinct_ropes[0]
        device = torch.device("cpu")
        self._rotary = rotary_table(rope, spec.head_dim, longest, torch.float32, device)

    def states(self, embedded: Tensor, tapped: Tensor, steps: int) -> list[Tensor]:
        """Return what logits are made of, as many times as tokens are drafted.

        The state at position t of step s is what the head has there if it drafted the s tokens up
        to t: then it knows the model's states up to position t - s - 1, and its own from there on.

        Args:
            embedded: [sequences, tokens, hidden] embeddings of the tokens from the second on.
            tapped: [sequences, tokens, layers * hidden] what it is given of the tokens before them.
            steps: how many tokens are drafted.

        Returns:
            Normalized states [sequences, tokens, hidden] for each step; the first s positions of
            step s stand for nothing.
        """
        states, result = F.linear(tapped, self.weights["fc.weight"]), list[Tensor]()
        tokens = self._norm(_LAYER + "input_layernorm", embedded)
        keys, values = list[Tensor](), list[Tensor]()
        for _ in range(steps):
            out = self._layer(tokens, states, keys, values)
            result.append(self._norm("norm", out))
            states = F.pad(out[:, :-1], (0, 0, 1, 0))
        return result

    def _layer(
        self, tokens: Tensor, states: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        both = torch.cat((tokens, self._norm(_LAYER + "hidden_norm", states)), dim=-1)
        attended = self._attend(both, keys, values)
        x = states + self._linear(_ATTENTION + "o_proj", attended)
        normed = self._norm(_LAYER + "post_attention_layernorm", x)
        gated = F.silu(self._linear(_MLP + "gate_proj", normed))
        return x + self._linear(_MLP + "down_proj", gated * self._linear(_MLP + "up_proj", normed))

    def _attend(self, both: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend to the keys of all steps so far and of this one, which are appended."""
        length, groups = both.shape[1], self._spec.num_heads // self._spec.num_kv_heads
        # The first token of a sequence has no state before it, and is not here.
        cos, sin = rotation(self._rotary, torch.arange(1, length + 1))
        query = rotate(self._heads("q", both), cos, sin).transpose(1, 2)
        key = rotate(self._heads("k", both), cos, sin).transpose(1, 2)
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(self._heads("v", both).transpose(1, 2).repeat_interleave(groups, dim=1))
        step = len(keys) - 1
        scores = [query @ keys[0].transpose(2, 3) + _mask(length, step)]
        for place in range(1, step + 1):
            later = _later(keys[place], step - place)
            scores.append((query * later).sum(dim=-1, keepdim=True))
        weights = torch.softmax(torch.cat(scores, dim=-1) * self._spec.head_dim**-0.5, dim=-1)
        out = weights[..., :length] @ values[0]
        for place in range(1, step + 1):
            weight = weights[..., length + place - 1 : length + place]
            out = out + weight * _later(values[place], step - place)
        return out.transpose(1, 2).flatten(2)

    def _heads(self, name: str, both: Tensor) -> Tensor:
        projected = self._linear(f"{_ATTENTION}{name}_proj", both)
        return projected.view(*both.shape[:2], -1, self._spec.head_dim)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name + ".weight"]
        return F.rms_norm(x, weight.shape, weight, self._spec.norm.eps)


def _mask(length: int, step: int) -> Tensor:
    """Return what leaves the first step's keys of up to `step` tokens before, and no others."""
    return torch.full((length, length), float("-inf")).triu(1 - step)


def _later(heads: Tensor, count: int) -> Tensor:
    """Move [sequences, heads, tokens, width] to positions that are so much later."""
    return F.pad(heads[:, :, : heads.shape[2] - count], (0, 0, count, 0))


def save_head(
    directory: Path,
    weights: dict[str, Tensor],
    *,
    layers: tuple[int, ...],
    lm_head: Tensor,
    token_ids: Tensor,
    target: dict[str, Any],
) -> None:
    """Write a head that `--speculative-model` takes.

    Args:
        directory: is made if it is not there.
        weights: those that were trained.
        layers: after how many layers of the model its states are taken; the first is not 1, which
            stands for something else in such files.
        lm_head: [tokens, hidden] of the tokens that it drafts.
        token_ids: [tokens] what these are.
        target: config.json of the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    tensors["lm_head.weight"] = lm_head
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    save_file(tensors, directory / "model.safetensors")
    config = {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(token_ids),
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "use_aux_hidden_state": True,
        },
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
