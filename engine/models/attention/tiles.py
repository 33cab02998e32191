"""How the queries of a step are cut into tiles for the attention kernel of CUDA devices.

`engine.kernels.cuda.attention` says what a tile is. Plain arithmetic: no device is needed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.models.attention.rows import AttentionRows, IntArray, parts_of

Tiles = npt.NDArray[np.int32]
"""[tiles, 4]: row, first token, its position, number of tokens."""

_FEWEST_QUERIES = 16
"""Rows of the smallest product of a device's matrix units."""
MAX_SPLITS = 32
_PROGRAMS_EACH = 2
"""Programs for each of a device's multiprocessors, so that one computes while another waits."""


class TileShape(NamedTuple):
    """How large tiles are, and how a program is run that attends from one."""

    queries: int
    """Tokens times heads that share a KV head."""
    keys: int
    """Keys that are attended to at once."""
    num_warps: int
    num_stages: int


class TileShapes(NamedTuple):
    """The tiles of rows with few tokens and of prompts."""

    decodes: TileShape
    prompts: TileShape

    @property
    def are_alike(self) -> bool:
        """Whether a token is computed alike in a decode and in a prompt."""
        return self.decodes == self.prompts


def next_power_of_two(number: int) -> int:
    """Return the least power of two that is no less: sizes within a kernel are such."""
    return 1 << (number - 1).bit_length()


def tile_shapes(
    group: int, head_dim: int, shared_memory: int, *, batch_invariant: bool
) -> TileShapes:
    """Return the shapes for heads of a model on a device.

    Args:
        group: query heads that share a KV head.
        shared_memory: bytes that a program may have.
        batch_invariant: whether each token is to get the same bits in a decode as in a prompt.
    """
    least = max(_FEWEST_QUERIES, next_power_of_two(group))
    is_wide = head_dim > 128
    keys = 32 if is_wide else 64
    stages = 3 if shared_memory >= 160 * 1024 and not is_wide else 2
    if batch_invariant:
        shape = TileShape(max(64, least), keys, 4, stages)
        return TileShapes(shape, shape)
    prompts = TileShape(max(64 if is_wide else 128, least), keys, 4, stages)
    return TileShapes(TileShape(least, keys, 4, stages), prompts)


def tiles_of(rows: AttentionRows, chosen: IntArray, tokens_each: int) -> Tiles:
    """Return the tiles of some rows, those with most keys first, as they take longest."""
    parts = parts_of(rows, chosen, tokens_each)
    return np.ascontiguousarray(parts[np.argsort(-parts[:, 2], kind="stable")], dtype=np.int32)


def decode_tiles(num_keys: npt.NDArray[np.int32]) -> Tiles:
    """Return the tiles of a step in which each row has one token, in their order."""
    row = np.arange(len(num_keys), dtype=np.int32)
    return np.stack([row, row, num_keys - 1, np.ones_like(row)], axis=1)


def num_splits(programs: int, max_keys: int, keys_at_once: int, multiprocessors: int) -> int:
    """Return among how many programs the keys of each tile are split.

    Args:
        programs: that there are without.
        max_keys: of one tile.
        keys_at_once: see `TileShape`; each split has twice as many at least.
        multiprocessors: of the device.
    """
    wanted = -(-_PROGRAMS_EACH * multiprocessors // programs)
    return max(1, min(MAX_SPLITS, wanted, max_keys // (2 * keys_at_once)))
