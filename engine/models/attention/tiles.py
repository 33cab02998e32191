"""How the queries of a step are cut into tiles for the CUDA attention kernel.

`engine.kernels.cuda.attention` defines tiles. Plain arithmetic: needs no device.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.models.attention.rows import AttentionRows, IntArray, parts_of

Tiles = npt.NDArray[np.int32]
"""[tiles, 4]: row, first token, its position, number of tokens."""

_FEWEST_QUERIES = 16
"""Minimum rows of a product on the matrix units."""
MAX_SPLITS = 32
_PROGRAMS_EACH = 2
"""Programs per multiprocessor, so that one computes while another waits."""


class TileShape(NamedTuple):
    """Tile size and launch parameters of the programs."""

    queries: int
    """Tokens times heads per KV head."""
    keys: int
    """Keys processed at once."""
    num_warps: int
    num_stages: int


class TileShapes(NamedTuple):
    """Tile shapes for rows with few tokens and for prompts."""

    decodes: TileShape
    prompts: TileShape

    @property
    def are_alike(self) -> bool:
        """Whether decodes and prompts use the same tile shape."""
        return self.decodes == self.prompts


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two >= `number`, as kernel dimensions require."""
    return 1 << (number - 1).bit_length()


def tile_shapes(
    group: int, head_dim: int, shared_memory: int, *, batch_invariant: bool
) -> TileShapes:
    """Return the tile shapes for a model's heads on a device.

    Args:
        group: query heads per KV head.
        shared_memory: bytes available to a program.
        batch_invariant: whether a token must get the same bits in a decode and in a prompt.
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
    """Return the tiles of the chosen rows, most keys first, since those take longest."""
    parts = parts_of(rows, chosen, tokens_each)
    return np.ascontiguousarray(parts[np.argsort(-parts[:, 2], kind="stable")], dtype=np.int32)


def decode_tiles(num_keys: npt.NDArray[np.int32]) -> Tiles:
    """Return the tiles of a step with one token per row, in row order."""
    row = np.arange(len(num_keys), dtype=np.int32)
    return np.stack([row, row, num_keys - 1, np.ones_like(row)], axis=1)


def num_splits(programs: int, max_keys: int, keys_at_once: int, multiprocessors: int) -> int:
    """Return the number of programs among which to split each tile's keys.

    Args:
        programs: number of programs without splitting.
        max_keys: maximum keys of a tile.
        keys_at_once: see `TileShape`; each split gets at least twice this.
        multiprocessors: multiprocessors of the device.
    """
    target = -(-_PROGRAMS_EACH * multiprocessors // programs)
    return max(1, min(MAX_SPLITS, target, max_keys // (2 * keys_at_once)))
