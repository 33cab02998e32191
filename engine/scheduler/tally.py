"""Counts by key without zeros, so that the keys are those with a count."""


def add_one(counts: dict[int, int], key: int) -> None:
    """Count one more."""
    counts[key] = counts.get(key, 0) + 1


def take_one(counts: dict[int, int], key: int) -> None:
    """Count one less."""
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1
