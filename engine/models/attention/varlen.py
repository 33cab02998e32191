"""Paged attention on CUDA devices: one kernel call per layer, straight from the blocks.

The kernel is `torch.nn.attention.varlen.varlen_attn` with a block table. Which block sizes it
takes depends on the flash attention that the torch build contains, so it is tried once with the
shapes in question and compared with the stock operators, which are used where it does not work.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.models.attention.paged import PagedAttention, beside_sinks
from engine.models.attention.rows import AttentionRows

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]
"""With the signature of `varlen_attn`."""


class Attention(Protocol):
    """Plans a step once and attends in every layer; plans are for the attention that made them."""

    def plan(self, rows: AttentionRows, window: int | None) -> Any:
        """Prepare the rows of a step; `window` limits how far back a token looks."""
        ...

    def attend(
        self, queries: Tensor, cache: Tensor, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from [tokens, heads, head_dim] to the cache; return [tokens, heads * head_dim].

        Sinks [heads] are scores that take their share and give nothing, where the model has some.
        """
        ...


class VarlenPlan(msgspec.Struct, frozen=True):
    """The rows of a step as the kernel takes them; all tensors are int32."""

    query_ends: Tensor
    """[rows + 1] tokens before each row, and all."""
    key_ends: Tensor
    """The same of the keys."""
    num_keys: Tensor
    """[rows]"""
    block_tables: Tensor
    """[rows, blocks]"""
    max_queries: int
    max_keys: int
    window: tuple[int, int]
    """How many tokens each query sees to its left (-1: all) and right, itself not counted."""


class _Sums(NamedTuple):
    """Asks the kernel for more than averages (its `AuxRequest`, which old builds lack)."""

    lse: bool = True
    """The logarithms of the sums of the exponentials of scores."""


class VarlenAttention:
    """Attention by the kernel alone."""

    def __init__(
        self, *, device: torch.device, kernel: Kernel | None = None, scale: float | None = None
    ) -> None:
        """Compute on `device`; without a kernel, with torch's; `scale` as in `PagedAttention`.

        Raises:
            ImportError: this torch has none.
        """
        if kernel is None:
            from torch.nn.attention import varlen  # absent before torch 2.10, unpaged in 2.11

            kernel = varlen.varlen_attn
        self._kernel: Kernel = kernel
        self._scale = scale
        self._device = device

    def plan(self, rows: AttentionRows, window: int | None) -> VarlenPlan:
        """Return the arguments of the kernel for the rows of a step, which are in token order."""
        num_keys = rows.starts + rows.counts
        return VarlenPlan(
            query_ends=self._tensor(np.append(0, np.cumsum(rows.counts))),
            key_ends=self._tensor(np.append(0, np.cumsum(num_keys))),
            num_keys=self._tensor(num_keys),
            block_tables=self._tensor(rows.block_tables),
            max_queries=int(rows.counts.max()),
            max_keys=int(num_keys.max()),
            window=kernel_window(window),
        )

    def attend(
        self, queries: Tensor, cache: Tensor, plan: VarlenPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from all tokens of the step to the cache, which holds their keys already.

        Raises:
            ValueError: the kernel's sums are not [heads, tokens], which sinks need.
        """
        result = self._kernel(
            queries,
            cache[:, :, 0],
            cache[:, :, 1],
            plan.query_ends,
            plan.key_ends,
            plan.max_queries,
            plan.max_keys,
            scale=self._scale,
            window_size=plan.window,
            enable_gqa=queries.shape[1] != cache.shape[3],
            seqused_k=plan.num_keys,
            block_table=plan.block_tables,
            **({} if sinks is None else {"return_aux": _Sums()}),
        )
        if sinks is None:
            out: Tensor = result
        else:
            out, sums = result
            if sums.shape != (queries.shape[1], len(queries)):
                raise ValueError(f"the kernel's sums are {list(sums.shape)}")
            out = beside_sinks(out, sums.T, sinks)
        return out.reshape(len(queries), -1)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return to_device(np.ascontiguousarray(array, dtype=np.int32), self._device)


class CudaAttention:
    """The kernel where it works for a block size, else the stock operators."""

    def __init__(
        self,
        stock: PagedAttention,
        *,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        scale: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        """Attend with heads of `shape`: query heads, KV heads, size of a head; `scale` scores."""
        self._scale = scale
        self._has_sinks = has_sinks
        self._stock = stock
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._chosen: dict[int, Attention] = {}

    def for_blocks(self, block_size: int) -> Attention:
        """Return what attends to blocks of this size."""
        if block_size not in self._chosen:
            self._chosen[block_size] = self._try(block_size)
        return self._chosen[block_size]

    def plan(self, rows: AttentionRows, window: int | None) -> Any:
        """Prepare the rows of a step."""
        return self.for_blocks(rows.block_size).plan(rows, window)

    def attend(
        self, queries: Tensor, cache: Tensor, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from all tokens of the step to the cache, which holds their keys already."""
        return self.for_blocks(cache.shape[1]).attend(queries, cache, plan, sinks)

    def _try(self, block_size: int) -> Attention:
        if self._dtype.itemsize != 2:
            logger.info("attention in %s: stock operators, the kernel is for 16 bits", self._dtype)
            return self._stock
        try:
            varlen = VarlenAttention(device=self._device, scale=self._scale)
            difference = self._compare(varlen, block_size)
        except (ImportError, TypeError):
            logger.warning(
                "attention over blocks: stock operators, and no recorded steps, as the kernel of "
                "torch %s takes no tables of blocks; torch 2.12 is the first that has one",
                torch.__version__,
            )
            return self._stock
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning(
                "attention over blocks of %d tokens: stock operators, as the kernel refuses: %s; "
                "--block-size 256 suits most builds",
                block_size,
                reason,
            )
            return self._stock
        if difference > _MAX_DIFFERENCE:
            logger.warning("attention: the kernel differs by %.3f and is not used", difference)
            return self._stock
        return varlen

    def _compare(self, varlen: VarlenAttention, block_size: int) -> float:
        """Return the largest difference over a prefill, a chunk and a decode."""
        heads, kv_heads, head_dim = self._shape
        counts, starts = np.array([5, 3, 1]), np.array([0, block_size + 2, 2 * block_size - 1])
        rows = AttentionRows(
            starts=starts,
            counts=counts,
            first_token=np.cumsum(counts) - counts,
            block_tables=np.array([[3, 0], [2, 5], [1, 4]], np.int32),
            block_size=block_size,
        )
        generator = torch.Generator(self._device).manual_seed(0)
        options: Any = {"device": self._device, "dtype": self._dtype, "generator": generator}
        cache = torch.randn(6, block_size, 2, kv_heads, head_dim, **options)
        queries = torch.randn(int(counts.sum()), heads, head_dim, **options)
        sinks = torch.linspace(-1, 1, heads, device=self._device) if self._has_sinks else None
        ways: tuple[Attention, Attention] = (varlen, self._stock)
        one, other = (
            way.attend(queries, cache, way.plan(rows, None), sinks).float() for way in ways
        )
        return float((one - other).abs().max())


_MAX_DIFFERENCE = 0.05
"""Between two ways to compute averages of standard normal values in 16 bits."""


def kernel_window(window: int | None) -> tuple[int, int]:
    """Return the kernel's words for causal attention in which a token sees `window` tokens."""
    return (-1, 0) if window is None else (window - 1, 0)


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy an array, without waiting for the copy where the device has a stream of its own."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
