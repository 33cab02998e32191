"""Cache groups: which layers of a model share KV blocks.

A block holds some tokens' keys and values of all layers of one group. Layers with a sliding window
are in other groups than those that attend to all tokens, so that blocks behind it can be freed. All
groups have about equally many layers: so blocks of all groups have one size, and come from one
pool.
"""

from collections.abc import Sequence

import msgspec

MAX_GROUPS = 8
"""Each costs a block table and its part of the planning of every step."""
_WORTH_IT = 0.9
"""Share of the memory of one group that several may take at most."""


class CacheGroups(msgspec.Struct, frozen=True):
    """The groups of a model, and those of the layers that are here."""

    windows: tuple[int | None, ...] = (None,)
    """For each group of the whole model how far back its layers attend; None if they are mixed, or
    for all tokens."""
    of_layers: tuple[int, ...] = ()
    """The group of each layer that is here; empty if there is one group."""

    def group_of(self, layer: int) -> int:
        """Return the group of a layer that is here."""
        return self.of_layers[layer] if self.of_layers else 0

    def places(self, num_layers: int) -> list[int]:
        """Return the place of each layer that is here within the blocks of its group."""
        taken = [0] * len(self.windows)
        places = []
        for layer in range(num_layers):
            group = self.group_of(layer)
            places.append(taken[group])
            taken[group] += 1
        return places


def one_group(windows: Sequence[int | None]) -> CacheGroups:
    """Return all layers as one group, which slides if all of them do alike."""
    return CacheGroups((windows[0],) if len(set(windows)) == 1 else (None,))


def divide(windows: Sequence[int | None], longest: int, beside: float = 0.0) -> CacheGroups:
    """Return the groups in which the longest sequence takes least memory; one if it is the same.

    Args:
        windows: of all layers of the model.
        longest: tokens of that sequence.
        beside: what every block holds besides, in layers: the keys and values of a draft model.
    """
    kinds = list(dict.fromkeys(windows))
    if len(kinds) == 1:
        return one_group(windows)
    counts = [windows.count(kind) for kind in kinds]
    tokens = [longest if kind is None else min(kind, longest) for kind in kinds]
    sizes = [n for n in range(1, max(counts) + 1) if sum(-(-c // n) for c in counts) <= MAX_GROUPS]
    takes = {
        n: sum(-(-c // n) * t for c, t in zip(counts, tokens, strict=True)) * (n + beside)
        for n in sizes
    }
    size = min(sizes, key=lambda n: (takes[n], -n), default=0)
    if not size or takes[size] > _WORTH_IT * (len(windows) + beside) * longest:
        return one_group(windows)
    groups: list[int | None] = []
    of_layers = [0] * len(windows)
    for kind, count in zip(kinds, counts, strict=True):
        first, needed = len(groups), -(-count // size)
        groups += [kind] * needed
        layers = [layer for layer, window in enumerate(windows) if window == kind]
        for number, layer in enumerate(layers):  # stages get layers of all groups
            of_layers[layer] = first + number % needed
    return CacheGroups(tuple(groups), tuple(of_layers))
