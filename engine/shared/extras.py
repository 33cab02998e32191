"""How to install the packages of an extra into the environment that lacks them."""

import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of Swell needs, wherever Swell came from."""
    try:
        stated = requires("swell") or []
    except PackageNotFoundError:  # run from its sources
        stated = []
    markers = (f'extra == "{extra}"', f"extra == '{extra}'")
    wanted = [each.partition(";")[0].strip() for each in stated if each.endswith(markers)]
    return shlex.join([sys.executable, "-m", "pip", "install", *(wanted or [f"swell[{extra}]"])])
