"""Which models can be computed so that no row of a step depends on the others, and at what cost."""

import torch

from engine.kernels.registry import FusedKernels
from engine.models.attention.choice import attends_by_pairs, scores_are_capped
from engine.models.products.dense import has_product_kernel
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec, UnsupportedModel


def has_invariant_kernels(spec: ModelSpec, kernels: FusedKernels | None) -> bool:
    """Whether, on this CPU, kernels compute each row of products and attention by itself anyway."""
    return kernels is not None and has_product_kernel() and attends_by_pairs(spec)


def require_batch_invariance(
    spec: ModelSpec,
    types: ComputeTypes,
    device: torch.device,
    *,
    is_whole: bool,
    is_quantized: bool,
    has_adapters: bool,
    kernels: FusedKernels | None,
) -> None:
    """Check that --batch-invariant can be kept.

    Args:
        is_whole: whether one process has all of each layer.

    Raises:
        UnsupportedModel: it cannot.
    """
    if not is_whole:
        raise UnsupportedModel(
            "--batch-invariant: only engines that hold the whole model compute rows "
            "independently of each other"
        )
    if device.type == "cpu":
        by_kernel = kernels is not None and types.kept == "auto" and attends_by_pairs(spec)
        if spec.attention_softcap is not None and not by_kernel:
            raise scores_are_capped(spec)
        return
    if device.type != "cuda":
        raise UnsupportedModel(f"--batch-invariant: there are no kernels for {device.type}")
    lacking = {
        "computes in 32 bits (--dtype bfloat16)": types.activations.itemsize != 2,
        "has an 8-bit KV cache (--kv-cache-dtype auto)": types.kept != "auto",
        "is quantized": is_quantized,
        "has adapters": has_adapters,
        "has experts": spec.moe is not None,
        "has latent attention": spec.latent is not None,
        "attends in chunks": spec.has_chunks,
        "makes vectors": spec.num_outputs is not None,
    }
    found = [reason for reason, is_there in lacking.items() if is_there]
    if found:
        raise UnsupportedModel(
            f"--batch-invariant: on CUDA there are no kernels for a model that {found[0]}"
        )
