"""Where files are kept that Swell can make again, for one user of a machine."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the directory, which may not be there yet; `XDG_CACHE_HOME` puts it elsewhere."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swell"
