"""Swell's version and protocol version."""

SWELL_VERSION = "0.1.0"
"""The package version; pyproject.toml reads it from here."""

PROTOCOL_VERSION = 4
"""Incremented with every change of `engine.shared.messages` that older processes would misread.

An appended field whose default means the same as its absence needs no new version.
docs/deploy-reference.md lists what each version changed; the image's label and the chart contain it
too.
"""

SPOKEN_PROTOCOLS = (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
"""Supported protocols, newest first: a release is compatible with the previous one."""

OUTPUTS_IN_FRAMES = 4
"""First protocol in which front ends accept outputs in several frames (`transport.frames_of`)."""


def next_protocol(refused: int) -> int:
    """Return the protocol to try with a coordinator that has refused one."""
    index = SPOKEN_PROTOCOLS.index(refused) + 1
    return SPOKEN_PROTOCOLS[index % len(SPOKEN_PROTOCOLS)]
