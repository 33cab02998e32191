"""Compiles the large kernels of a model before it is loaded.

Engines that start together on a machine share the work: each compiles kernels that no other is
compiling, and loads the rest when a model needs them.
"""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.kernels.registry import has_experts_kernel
from engine.models.attention.choice import has_patch_attention
from engine.models.spec import ModelSpec

if TYPE_CHECKING:
    from engine.kernels.cpu.compiling import Kernel

logger = logging.getLogger(__name__)


def compile_ahead(spec: ModelSpec, *, draws_tokens: bool) -> None:
    """Compile a whole bfloat16 model's kernels for this CPU, slowest first.

    Models with quantized weights, adapters or an 8-bit KV cache, and distributed models, need fewer
    or other kernels, which are compiled on demand.
    """
    try:
        for kernel in _kernels_of(spec, draws_tokens):
            kernel.compile_ahead()
    except Exception as error:  # arbitrary ones; the kernel's first use reports them
        logger.debug("kernels are not compiled ahead: %s", error)


def _kernels_of(spec: ModelSpec, draws_tokens: bool) -> Iterator["Kernel"]:
    from engine.kernels.cpu import chosen_experts, draws, experts, filtered_draws
    from engine.kernels.cpu.patch_attention import patch_attention
    from engine.kernels.cpu.products import product_kernel

    product = product_kernel()
    if product is not None:
        yield product.compute
    if draws_tokens:
        yield filtered_draws.draw
    moe, hidden = spec.moe, spec.hidden_size
    plain = moe if moe is not None and moe.has_plain_experts else None
    if plain is not None and has_experts_kernel(hidden, plain.intermediate_size):
        yield chosen_experts.compute
    if has_patch_attention(spec):
        yield patch_attention(spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.num_kv_heads)
    if draws_tokens:
        yield draws.draw
    if moe is not None and moe.chooses_by_softmax:
        yield experts.choose
