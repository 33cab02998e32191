"""Attention on CUDA devices, reading directly from the blocks of the KV cache.

The kernel (`engine.kernels.cuda.attention`) takes 16-bit values and any block size. Before use it
is compiled and compared with the stock operators for the required shapes; the stock operators are
the fallback if it cannot be compiled or disagrees.
"""

import logging
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.attention.interface import Attention, Heads
from engine.models.attention.paged import PagedAttention
from engine.models.attention.rows import AttentionRows
from engine.models.attention.tiles import (
    MAX_SPLITS,
    Tiles,
    TileShape,
    decode_tiles,
    next_power_of_two,
    num_splits,
    tile_shapes,
    tiles_of,
)
from engine.models.device_copies import refill, to_device
from engine.models.spec import UnsupportedModel

logger = logging.getLogger(__name__)

_LOG2_E = 1.4426950408889634
_DECODE_QUERIES = 32
"""Rows with at most this many queries (tokens times heads per KV head) use the decode tile
shape."""
_MAX_DIFFERENCE = 0.05
"""Maximum difference between two 16-bit computations of averages of standard normal values."""


class KernelUnusable(Exception):
    """The kernel cannot be compiled here or computes wrong results."""


class TileLaunch(msgspec.Struct, frozen=True):
    """Kernel arguments for the tiles of some rows of a step."""

    tiles: Tensor
    """[tiles, 4] int32: see `engine.models.attention.tiles.Tiles`."""
    shape: TileShape
    num_splits: int
    max_tokens: int
    """Maximum per tile."""


class TilePlan(msgspec.Struct, frozen=True):
    """Tiles and block tables of all rows of a step."""

    launches: tuple[TileLaunch, ...]
    tables: Tensor
    """[rows, blocks] int32"""
    window: int | None


class KernelAttention:
    """Attention by the CUDA kernel, without fallback."""

    def __init__(
        self,
        heads: Heads,
        device: torch.device,
        *,
        batch_invariant: bool = False,
        multiprocessors: int | None = None,
    ) -> None:
        """Prepare for one shape of heads; `batch_invariant` as in `tile_shapes`.

        Keys are split to occupy `multiprocessors`; None means those of the device.

        Raises:
            KernelUnusable: Triton is not installed.
        """
        try:
            from engine.kernels.cuda import attention
        except ImportError as error:
            raise KernelUnusable(f"Triton cannot be imported: {error}") from error
        self._kernels = attention
        self._heads = heads
        self._group = heads.num_heads // heads.num_kv_heads
        self._device = device
        shared = 0
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            multiprocessors = multiprocessors or properties.multi_processor_count
            shared = getattr(properties, "shared_memory_per_block_optin", 0)
        self._multiprocessors = multiprocessors or 1
        self._shapes = tile_shapes(
            self._group, heads.head_dim, shared, batch_invariant=batch_invariant
        )
        scale = heads.scale or heads.head_dim**-0.5
        self._scale = scale if heads.softcap is not None else scale * _LOG2_E
        self._width = next_power_of_two(heads.head_dim)

    def plan(self, rows: AttentionRows, window: int | None) -> TilePlan:
        """Cut the rows of a step into tiles."""
        is_few = rows.counts * self._group <= _DECODE_QUERIES
        if self._shapes.are_alike:
            is_few = np.zeros_like(is_few)
        launches = []
        for chosen, shape in (
            (np.flatnonzero(is_few), self._shapes.decodes),
            (np.flatnonzero(~is_few), self._shapes.prompts),
        ):
            if not len(chosen):
                continue
            tiles = tiles_of(rows, chosen, shape.queries // self._group)
            splits = 1
            if shape is self._shapes.decodes:
                splits = self._num_splits(len(tiles), int(tiles[0, 2] + tiles[0, 3]))
            launches.append(self._launch(tiles, shape, splits))
        tables = np.ascontiguousarray(rows.block_tables, dtype=np.int32)
        return TilePlan(tuple(launches), to_device(tables, self._device), window)

    def plan_decodes(
        self, num_keys: npt.NDArray[np.int32], tables: npt.NDArray[np.int32], max_keys: int
    ) -> TilePlan:
        """Plan a step with one token per row; `replan` can update the plan in place.

        Args:
            num_keys: [rows] keys per row, including the new token's.
            tables: [rows, blocks], at maximum width.
            max_keys: maximum keys per row.
        """
        shape = self._shapes.decodes
        splits = self._num_splits(len(num_keys), max_keys)
        launch = self._launch(decode_tiles(num_keys), shape, splits)
        return TilePlan((launch,), to_device(tables, self._device), None)

    def replan(
        self, plan: TilePlan, num_keys: npt.NDArray[np.int32], tables: npt.NDArray[np.int32]
    ) -> None:
        """Write new rows into the tensors of a plan from `plan_decodes`."""
        refill(plan.launches[0].tiles, decode_tiles(num_keys))
        refill(plan.tables, tables)

    def _num_splits(self, num_tiles: int, max_keys: int) -> int:
        if self._shapes.are_alike:  # other rows must not affect the split
            return 1
        programs = num_tiles * self._heads.num_kv_heads
        return num_splits(programs, max_keys, self._shapes.decodes.keys, self._multiprocessors)

    def _launch(self, tiles: Tiles, shape: TileShape, splits: int) -> TileLaunch:
        max_tokens = int(tiles[:, 3].max())
        return TileLaunch(to_device(tiles, self._device), shape, splits, max_tokens)

    def attend(
        self, queries: Tensor, cache: Tensor, plan: TilePlan, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from all tokens of the step; the cache already holds their keys."""
        heads = self._heads
        out = queries.new_empty(len(queries), heads.num_heads * heads.head_dim)
        for launch in plan.launches:
            splits, num_tiles = launch.num_splits, len(launch.tiles)
            parts = part_sums = out
            if splits > 1:
                shape = num_tiles, launch.max_tokens, heads.num_heads, splits
                parts = out.new_empty(*shape, heads.head_dim, dtype=torch.float32)
                part_sums = out.new_empty(shape, dtype=torch.float32)
            self._kernels.attend_tiles[num_tiles, heads.num_kv_heads, splits](
                queries,
                cache,
                out if sinks is None else sinks,
                out,
                parts,
                part_sums,
                launch.tiles,
                plan.tables,
                plan.tables.shape[1],
                splits,
                plan.window or 0,
                launch.max_tokens,
                queries.stride(0),
                self._scale,
                heads.softcap or 1.0,
                GROUP=self._group,
                KV_HEADS=heads.num_kv_heads,
                DIM=heads.head_dim,
                WIDTH=self._width,
                BLOCK_SIZE=cache.shape[1],
                QUERIES=launch.shape.queries,
                KEYS=launch.shape.keys,
                HAS_SINKS=sinks is not None,
                HAS_CAP=heads.softcap is not None,
                HAS_WINDOW=plan.window is not None,
                IS_SPLIT=splits > 1,
                num_warps=launch.shape.num_warps,
                num_stages=launch.shape.num_stages,
            )
            if splits > 1:
                self._kernels.merge_splits[num_tiles * launch.max_tokens, heads.num_heads](
                    parts,
                    part_sums,
                    launch.tiles,
                    out,
                    splits,
                    launch.max_tokens,
                    HEADS=heads.num_heads,
                    DIM=heads.head_dim,
                    WIDTH=self._width,
                    SPLITS=MAX_SPLITS,
                )
        return out


@dataclass(eq=False)
class CudaAttention:
    """The kernel for block sizes where it works, otherwise the stock operators."""

    stock: PagedAttention
    heads: Heads
    _: KW_ONLY
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = (None,)
    """Sliding windows of the model's layers; each is tested."""
    has_sinks: bool = False
    batch_invariant: bool = False
    """Forbids the stock operators."""

    def __post_init__(self) -> None:
        self._chosen: dict[int, Attention] = {}

    def for_blocks(self, block_size: int) -> Attention:
        """Return the attention for this block size; the choice is cached.

        Raises:
            UnsupportedModel: the kernel does not work and batch invariance requires it.
        """
        if block_size not in self._chosen:
            self._chosen[block_size] = self._choose(block_size)
        return self._chosen[block_size]

    def plan(self, rows: AttentionRows, window: int | None) -> Any:
        """Plan the rows of a step."""
        return self.for_blocks(rows.block_size).plan(rows, window)

    def attend(
        self, queries: Tensor, cache: Tensor, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from all tokens of the step; the cache already holds their keys."""
        return self.for_blocks(cache.shape[1]).attend(queries, cache, plan, sinks)

    def _choose(self, block_size: int) -> Attention:
        try:
            return self._tried(block_size)
        except KernelUnusable as error:
            if self.batch_invariant:
                raise UnsupportedModel(f"--batch-invariant: {error}") from error
            logger.warning("using stock attention operators, without CUDA graphs: %s", error)
            return self.stock

    def _tried(self, block_size: int) -> KernelAttention:
        if self.dtype.itemsize != 2:
            raise KernelUnusable(f"the kernel requires a 16-bit dtype, not {self.dtype}")
        # Both few and many multiprocessors, to compile all variants that steps will need.
        few, many, kernel = (
            KernelAttention(
                self.heads,
                self.device,
                batch_invariant=self.batch_invariant,
                multiprocessors=count,
            )
            for count in (1, 1 << 20, None)
        )
        try:
            differences = [
                each
                for window in self.windows
                for each in self._differences((few, many), block_size, window)
            ]
        except Exception as error:  # Triton's compiler raises arbitrary exceptions
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise KernelUnusable(f"the kernel fails: {reason}") from error
        for difference in differences:
            if not difference <= _MAX_DIFFERENCE:  # true for NaN too
                raise KernelUnusable(f"the kernel's results differ by {difference:.3f}")
        return kernel

    def _differences(
        self, kernels: tuple[KernelAttention, ...], block_size: int, window: int | None
    ) -> list[float]:
        """Return each kernel's largest difference over a prompt, a chunk, a draft and decodes.

        The last decode has enough keys to be split, if the kernel splits at all.
        """
        counts = np.array([37, 40, 3, 1, 1])
        starts = np.array([0, block_size + 2, 2 * block_size - 1, 3, 600])
        width = -(-700 // block_size)
        rows = AttentionRows(
            starts=starts,
            counts=counts,
            first_token=np.cumsum(counts) - counts,
            block_tables=np.random.default_rng(0)
            .permutation(len(counts) * width)
            .reshape(len(counts), width)
            .astype(np.int32),
            block_size=block_size,
        )
        generator = torch.Generator(self.device).manual_seed(0)
        options: Any = {"device": self.device, "dtype": self.dtype, "generator": generator}
        heads, kv_heads, head_dim, *_ = self.heads
        cache = torch.randn(len(counts) * width, block_size, 2, kv_heads, head_dim, **options)
        queries = torch.randn(int(counts.sum()), heads, head_dim, **options)
        sinks = torch.linspace(-1, 1, heads, device=self.device) if self.has_sinks else None
        ways: tuple[Attention, ...] = (self.stock, *kernels)
        plain, *results = (
            way.attend(queries, cache, way.plan(rows, window), sinks).float() for way in ways
        )
        return [float((result - plain).abs().max()) for result in results]
