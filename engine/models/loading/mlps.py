"""A layer's MLP: dense, or experts with a router."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.reference import Experts, choose_experts, gating
from engine.kernels.registry import (
    FusedKernels,
    expert_choice,
    experts_kernel,
    swiglu_of_chosen,
)
from engine.models.layers import Chain, gated
from engine.models.loading.products import ProductLoader
from engine.models.module import Module, Rows
from engine.models.moe import (
    AllExperts,
    Expert,
    GroupedExperts,
    GroupRouter,
    KernelExperts,
    Router,
    SparseMlp,
    StackedExperts,
)
from engine.models.parallel.experts import DistributedExperts, ExpertGroup
from engine.models.products.dense import prepare_linear
from engine.models.rowwise_experts import RowwiseExperts
from engine.models.spec import ModelSpec, MoeSpec

_MAX_WASTE = 4
"""Maximum ratio of computed to required expert arithmetic, to save calls."""
_SMALL_LAYER = 16 * 2**20
"""Bytes of a layer's experts that fit a processor's cache."""


class GroupPosition(NamedTuple):
    """An engine's position among those that share the experts."""

    position: int
    size: int


@dataclass(eq=False)
class MlpLoader:
    """Assembles the MLPs of one model; prefixes are those of a layer's tensor names."""

    spec: ModelSpec
    """Of this process."""
    products: ProductLoader
    group: ExpertGroup | None
    """The group over which experts are spread, if any."""
    kernels: FusedKernels | None = None

    def __post_init__(self) -> None:
        self._gated = gated(self.spec, self.kernels)

    def dense(self, prefix: str, inner: int) -> Rows:
        """Return an MLP with `inner` hidden units, and adapters if enabled."""
        return self._gated_mlp(prefix, inner, has_bias=self.spec.mlp_bias)

    def _gated_mlp(
        self, prefix: str, inner: int, *, has_bias: bool, is_expert: bool = False
    ) -> Module:
        products, gate, hidden = self.products, self._gated, self.spec.hidden_size
        names = _names(prefix)
        bias = [f"{name}.bias" for name in names] if has_bias else []
        gate_up = products.linear(f"{names[0]}.weight", f"{names[1]}.weight", bias=bias[:2])
        down = products.linear(f"{names[2]}.weight", bias=bias[2:])
        bank = products.bank
        if bank is None or (is_expert and self.group is not None):
            return products.by_rows(Expert(gate_up, down, gate), hidden)
        gate_up, down = products.by_rows(gate_up, hidden), products.by_rows(down, inner)
        widths = [inner, inner]
        if is_expert:  # adapter memory is allocated with the first adapter
            gate_up = bank.adapted(gate_up, names[:2], widths, of="expert")
            down = bank.adapted(down, names[2:], [hidden], of="expert")
        else:
            gate_up = bank.adapted(gate_up, names[:2], widths, inputs=hidden)
            down = bank.adapted(down, names[2:], [hidden], inputs=inner)
        return Expert(gate_up, down, products.by_rows(Chain(gate), 2 * inner))

    def sparse(self, prefix: str, layer: int) -> SparseMlp:
        """Return a layer's mixture of experts, with this engine's share if they are spread."""
        moe = self.spec.moe
        assert moe is not None
        router, shared = self._router(moe, prefix), None
        if moe.shared_size:
            shared = self.dense(prefix + "shared_experts.", moe.shared_size)
        if self.group is None:
            experts = self._experts(moe, prefix)
            return SparseMlp(router, experts, shared, scales_inputs=moe.scales_inputs)
        spread = DistributedExperts(self.group, layer)
        self.load_share(spread, prefix, layer)
        partition = partial(self.group.compute_own_tokens, bank=self.products.bank)
        return SparseMlp(router, spread, shared, partition, scales_inputs=moe.scales_inputs)

    def load_share(self, experts: DistributedExperts, prefix: str, layer: int) -> None:
        """Keep this engine's experts, drop all others and load missing ones."""
        assert self.group is not None
        experts.set_local_experts(
            *self.group.local_copies(layer), lambda number: self._expert(prefix, number)
        )

    def _router(self, moe: MoeSpec, prefix: str) -> Router | GroupRouter:
        # The choice of experts is sensitive to small differences, and the product is small.
        products = self.products
        bias = products.copy(prefix + "router.bias") if moe.bias else None
        weight = products.copy(prefix + "router.weight")
        by_softmax = moe.chooses_by_softmax
        if by_softmax and products.by_kernels:
            weight, bias = products.whole_blocks(weight, bias)
        score = products.plain(weight, bias)
        if products.bank is not None:
            names, hidden = [prefix + "router"], self.spec.hidden_size
            score = products.adapted(score, names, [moe.num_experts], hidden)
        elif moe.in_float32:  # adapters compute in the model's dtype
            exact = prepare_linear(products.copy(prefix + "router.weight").float())
            score = Chain(torch.Tensor.float, self._scores(exact, torch.float32))
        else:
            score = self._scores(score)
        if by_softmax:
            choose = choose_experts
            if self.kernels is not None:
                choose = expert_choice(products.dtype, products.device)
            return Router(
                score,
                moe.num_experts,
                moe.experts_per_token,
                normalize=moe.normalize_weights,
                choose=choose,
            )
        correction = None
        if moe.has_correction:
            correction = products.checkpoint.tensor(prefix + "router.correction")
            correction = correction.to(products.device, torch.float32, copy=True)
        return GroupRouter(score, correction, moe)

    def _scores(self, product: Rows, dtype: torch.dtype | None = None) -> Rows:
        products = self.products
        by_rows = products.splits_experts and self.group is None
        return products.by_rows(product, self.spec.hidden_size, dtype) if by_rows else product

    def _expert(self, prefix: str, number: int) -> Module:
        moe = self.spec.moe
        assert moe is not None
        prefix, inner = f"{prefix}experts.{number}.", moe.intermediate_size
        return self._gated_mlp(prefix, inner, has_bias=moe.bias, is_expert=True)

    def _experts(self, moe: MoeSpec, prefix: str) -> Experts:
        products, hidden, inner = self.products, self.spec.hidden_size, moe.intermediate_size
        is_swiglu = self.kernels is not None and self._gated == self.kernels.swiglu
        if is_swiglu and moe.has_plain_experts and products.by_kernels:
            by_kernel = experts_kernel(hidden, inner)
            if by_kernel is not None:
                made = by_kernel(self._expert_weights(moe, prefix))
                return KernelExperts(made, made.weights)
        num_bytes = 3 * moe.num_experts * hidden * inner * products.dtype.itemsize
        is_few = moe.num_experts <= _MAX_WASTE * moe.experts_per_token
        is_small = is_few and num_bytes <= _SMALL_LAYER
        if not is_small or not moe.has_plain_experts or products.bank is not None:
            experts = [self._expert(prefix, i) for i in range(moe.num_experts)]
            return GroupedExperts(experts, products.bank)
        gate_up, down = zip(*self._expert_weights(moe, prefix), strict=True)
        if products.by_kernels:
            first = products.by_rows(products.prepare(torch.cat(gate_up), None), hidden)
            second = products.prepare(torch.cat(down, dim=1), None)
            second = products.by_rows(second, moe.num_experts * inner)
            gate = gating(self._gated)
            if is_swiglu:
                gate = swiglu_of_chosen(products.dtype, products.device)
            return AllExperts(first, second, moe.num_experts, gate)
        kind = RowwiseExperts if products.splits_experts else StackedExperts
        return kind(torch.stack(gate_up), torch.stack([each.T for each in down]), self._gated)

    def _expert_weights(self, moe: MoeSpec, prefix: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each expert's weights: [2 * inner, hidden] and [hidden, inner]."""
        products = self.products
        for number in range(moe.num_experts):
            names = _names(f"{prefix}experts.{number}.")
            gate, up, down = (f"{name}.weight" for name in names)
            yield products.fused([gate, up]), products.copy(down)


def _names(prefix: str) -> list[str]:
    """Return the names of the gate, up and down products of an MLP."""
    return [f"{prefix}{part}_proj" for part in ("gate", "up", "down")]
