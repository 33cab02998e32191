"""The per-user directory of files that Swell can regenerate."""

import os
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """Return the directory, which may not exist yet; `XDG_CACHE_HOME` overrides its location.

    A user without a home directory, as in containers, gets a private one in the temporary
    directory.

    Raises:
        OSError: another user owns that path.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "swell"
    try:
        return Path.home() / ".cache" / "swell"
    except RuntimeError:
        # Imported here: image builds that compile kernels copy this file alone.
        from engine.shared.node_directory import make_private

        private = Path(tempfile.gettempdir()) / f"swell-cache-{os.geteuid()}"
        make_private(private)
        return private
