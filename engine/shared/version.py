"""Which Swell this is, and which messages it speaks."""

SWELL_VERSION = "0.1.0"
"""The version of this package; pyproject.toml reads it from here."""

PROTOCOL_VERSION = 4
"""Grows with every change of `engine.shared.messages` that an older process would misunderstand.

Fields appended with a default that means what their absence meant before do not change it.
docs/deploy-reference.md lists what each version changed; the image's label and the chart state
it too.
"""

SPOKEN_PROTOCOLS = (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
"""What this version understands, the newest first: a release works with the one before."""

OUTPUTS_IN_FRAMES = 4
"""The first protocol whose front ends take outputs in several frames (`transport.frames_of`)."""


def next_protocol(refused: int) -> int:
    """Return what to speak to a coordinator that has refused a protocol."""
    place = SPOKEN_PROTOCOLS.index(refused) + 1
    return SPOKEN_PROTOCOLS[place % len(SPOKEN_PROTOCOLS)]
