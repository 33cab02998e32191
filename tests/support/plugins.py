"""Fake installed packages with entry points."""

from pathlib import Path


def offer(directory: Path, group: str, **entry_points: str) -> None:
    """Write the metadata of an installed package into a directory on the path."""
    package = f"offers-{'-'.join(sorted(entry_points))}".lower()
    metadata = directory / f"{package.replace('-', '_')}-2.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5\n")
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
