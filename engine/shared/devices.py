"""Counts the visible CUDA devices without loading torch."""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path("/")


def num_cuda_devices(
    environment: Mapping[str, str] = os.environ, root: Path = _ROOT, *, torch: Path | None = None
) -> int:
    """Return the number of CUDA devices; 0 if torch is missing or a CPU-only build.

    Args:
        environment: respected for `CUDA_VISIBLE_DEVICES`.
        root: directory that contains `dev`.
        torch: torch's package directory; None: the installed one.
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
        # CUDA ignores the list from the first invalid entry on.
        is_number = name.strip().isdecimal()
        is_there = int(name) < found if is_number else name.strip().startswith(("GPU-", "MIG-"))
        if not is_there:
            break
        count += 1
    return count
