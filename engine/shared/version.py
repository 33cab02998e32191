"""Which Swell this is, and which messages it speaks."""

import functools
from importlib.metadata import version

PROTOCOL_VERSION = 2
"""Grows with every change of `engine.shared.messages` that an older process would misunderstand.

Fields appended with a default that means what their absence meant before do not change it.
Processes of different versions of Swell work together as long as this is the same.
"""


@functools.cache
def swell_version() -> str:
    """Return the installed version of Swell."""
    return version("swell")
