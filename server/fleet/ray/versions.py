"""Whether a node has the supervisor's versions. The only I/O is to look at what is installed."""

from collections.abc import Mapping
from importlib import metadata

from engine.shared.version import SWELL_VERSION


def differences(there: Mapping[str, str], node: str) -> str | None:
    """Return what is different on a node, naming both versions; None if nothing is.

    Args:
        there: what its actor says is installed.
    """
    here = {"swell": SWELL_VERSION, "torch": _torch()}
    found = [
        f"{name} {there.get(name, 'none')} there, {version} here"
        for name, version in here.items()
        # A head node without torch has nothing to compare.
        if version != "none" and there.get(name) != version
    ]
    if not found and there.get("relay", "").startswith("none"):
        found = [f"no Ray backend there: {there['relay']}"]
    if not found:
        return None
    return f"node {node} has other versions: {'; '.join(found)}. Install the same on all nodes"


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"
