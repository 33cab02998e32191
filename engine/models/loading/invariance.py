"""Which models can compute rows of a step independently of each other, and at what cost."""

import logging

import torch

from engine.kernels.processor import is_invariance_cheap, is_invariance_free
from engine.kernels.registry import FusedKernels, has_product_kernel
from engine.models.attention.choice import has_patch_attention, scores_are_capped
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.shared.config import EngineConfig

logger = logging.getLogger(__name__)


def is_batch_invariant(
    config: EngineConfig,
    spec: ModelSpec,
    types: ComputeTypes,
    device: torch.device,
    *,
    kernels: FusedKernels | None,
    is_quantized: bool,
) -> bool:
    """Return the setting, or by default whether batch invariance costs little, logging the choice.

    Args:
        kernels: fused kernels used by the model.
        is_quantized: whether the model's products are quantized.
    """
    setting = config.executor.batch_invariant
    if setting is not None:
        return setting
    reason: str | None = "the model is quantized"
    if not is_quantized:
        reason = _reason_against(config, spec, types, device, kernels)
    if reason is None:
        logger.info("batch-invariant: tokens do not depend on the rest of their step")
    else:
        logger.info("not batch-invariant, because %s (--batch-invariant)", reason)
    return reason is None


def _reason_against(
    config: EngineConfig,
    spec: ModelSpec,
    types: ComputeTypes,
    device: torch.device,
    kernels: FusedKernels | None,
) -> str | None:
    """Return why batch invariance is impossible or not known to be cheap; None if cheap."""
    parallel = config.parallel
    if device.type != "cpu":
        return "the model is not on a CPU"
    if parallel.processes > 1 or parallel.enable_expert_parallel:
        return "several processes share the model"
    by_kernels = has_invariant_kernels(spec, kernels)
    if not by_kernels and types.activations != torch.float32:
        return "no kernels compute its products and its attention row by row"
    is_cheap = is_invariance_free() if by_kernels else is_invariance_cheap()
    if not is_cheap:
        return "it is slow on this processor"
    unmeasured = {
        "capped scores": not by_kernels and spec.attention_softcap is not None,
        "sliding windows": not by_kernels and any(window is not None for window in spec.windows),
        "latent attention": spec.latent is not None,
        "adapters": config.lora.enable_lora,
        "an 8-bit KV cache": types.kv_cache_dtype != "auto",
    }
    found = [name for name, is_there in unmeasured.items() if is_there]
    return f"it has {' and '.join(found)}" if found else None


def has_invariant_kernels(spec: ModelSpec, kernels: FusedKernels | None) -> bool:
    """Return whether this CPU's kernels compute each row of products and attention separately."""
    return kernels is not None and has_product_kernel() and has_patch_attention(spec)


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
    """Check that --batch-invariant is supported.

    Args:
        is_whole: whether one process has all of each layer.

    Raises:
        UnsupportedModel: it is not.
    """
    if not is_whole:
        raise UnsupportedModel(
            "--batch-invariant: only engines that hold the whole model compute rows "
            "independently of each other"
        )
    if device.type == "cpu":
        by_kernel = (
            kernels is not None and types.kv_cache_dtype == "auto" and has_patch_attention(spec)
        )
        if spec.attention_softcap is not None and not by_kernel:
            raise scores_are_capped(spec)
        return
    if device.type != "cuda":
        raise UnsupportedModel(f"--batch-invariant: there are no kernels for {device.type}")
    lacking = {
        "computes in 32 bits (--dtype bfloat16)": types.activations.itemsize != 2,
        "has an 8-bit KV cache (--kv-cache-dtype auto)": types.kv_cache_dtype != "auto",
        "is quantized": is_quantized,
        "has adapters": has_adapters,
        "has experts": spec.moe is not None,
        "has latent attention": spec.latent is not None,
        "attends in chunks": spec.has_chunks,
        "pools its states": spec.num_outputs is not None,
    }
    found = [reason for reason, is_there in lacking.items() if is_there]
    if found:
        raise UnsupportedModel(
            f"--batch-invariant: on CUDA there are no kernels for a model that {found[0]}"
        )
