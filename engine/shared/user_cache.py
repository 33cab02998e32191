"""Where files are kept that Swell can make again, for one user of a machine."""

import os
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """Return the directory, which may not be there yet; `XDG_CACHE_HOME` puts it elsewhere.

    A user without a home directory, as containers have, gets a private one for temporary files.

    Raises:
        OSError: another user has put something in its place.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "swell"
    try:
        return Path.home() / ".cache" / "swell"
    except RuntimeError:
        # Not above: where kernels are compiled for an image, this file is there alone.
        from engine.shared.node_directory import make_private

        private = Path(tempfile.gettempdir()) / f"swell-cache-{os.geteuid()}"
        make_private(private)
        return private
