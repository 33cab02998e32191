"""The optimizers and the learning rate over a run."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .model import LanguageModel


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
