"""How many CUDA devices the engines of this machine would see, found without loading torch."""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path("/")


def num_cuda_devices(
    environment: Mapping[str, str] = os.environ, root: Path = _ROOT, *, torch: Path | None = None
) -> int:
    """Return how many there are; 0 also where torch is made for CPUs alone, or missing.

    Args:
        environment: `CUDA_VISIBLE_DEVICES` may hide some.
        root: where `/dev` is.
        torch: its package; None: the installed one.
    """
    if torch is None and (spec := find_spec("torch")) is not None and spec.origin is not None:
        torch = Path(spec.origin).parent
    try:
        text = "" if torch is None else (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return 0
    if not re.search(r"^cuda\b.*= *['\"]", text, re.MULTILINE):
        return 0
    found = sum(1 for each in (root / "dev").glob("nvidia*") if re.search(r"\d$", each.name))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    count = 0
    for name in visible.split(","):
        # CUDA ignores the list from the first name on that is no device's.
        is_number = name.strip().isdecimal()
        is_there = int(name) < found if is_number else name.strip().startswith(("GPU-", "MIG-"))
        if not is_there:
            break
        count += 1
    return count
