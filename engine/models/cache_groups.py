"""Cache groups: which layers of a model share KV blocks.

A block holds some tokens' keys and values of all layers of one group. Layers with a sliding window
are grouped separately from full-attention layers, so that blocks behind the window can be freed.
All groups have about the same number of layers, so their blocks have one size and share a pool.
"""

from collections.abc import Sequence

import msgspec

MAX_GROUPS = 8
"""Each group costs a block table and planning time in every step."""
_WORTH_IT = 0.9
"""Maximum memory of several groups, relative to one group."""


class CacheGroups(msgspec.Struct, frozen=True):
    """The cache groups of a model, and the group of each local layer."""

    windows: tuple[int | None, ...] = (None,)
    """Sliding window of each group of the whole model; None for full attention or mixed windows."""
    of_layers: tuple[int, ...] = ()
    """Group of each local layer; empty with a single group."""

    def group_of(self, layer: int) -> int:
        """Return the group of a local layer."""
        return self.of_layers[layer] if self.of_layers else 0

    def tensor_indices(self, num_layers: int) -> list[int]:
        """Return the index of each local layer within the blocks of its group."""
        used = [0] * len(self.windows)
        indices = []
        for layer in range(num_layers):
            group = self.group_of(layer)
            indices.append(used[group])
            used[group] += 1
        return indices


def one_group(windows: Sequence[int | None]) -> CacheGroups:
    """Return a single group, which slides if all layers have the same window."""
    return CacheGroups((windows[0],) if len(set(windows)) == 1 else (None,))


def divide(windows: Sequence[int | None], longest: int, extra_layers: float = 0.0) -> CacheGroups:
    """Return the groups that need least memory for the longest sequence; one group if equal.

    Args:
        windows: of all layers of the model.
        longest: tokens of that sequence.
        extra_layers: additional layers stored in every block: the keys and values of a draft model.
    """
    kinds = list(dict.fromkeys(windows))
    if len(kinds) == 1:
        return one_group(windows)
    counts = [windows.count(kind) for kind in kinds]
    tokens = [longest if kind is None else min(kind, longest) for kind in kinds]
    sizes = [n for n in range(1, max(counts) + 1) if sum(-(-c // n) for c in counts) <= MAX_GROUPS]
    takes = {
        n: sum(-(-c // n) * t for c, t in zip(counts, tokens, strict=True)) * (n + extra_layers)
        for n in sizes
    }
    size = min(sizes, key=lambda n: (takes[n], -n), default=0)
    if not size or takes[size] > _WORTH_IT * (len(windows) + extra_layers) * longest:
        return one_group(windows)
    groups: list[int | None] = []
    of_layers = [0] * len(windows)
    for kind, count in zip(kinds, counts, strict=True):
        first, needed = len(groups), -(-count // size)
        groups += [kind] * needed
        layers = [layer for layer, window in enumerate(windows) if window == kind]
        for number, layer in enumerate(layers):  # every stage gets layers of all groups
            of_layers[layer] = first + number % needed
    return CacheGroups(tuple(groups), tuple(of_layers))
