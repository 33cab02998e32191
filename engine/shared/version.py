"""Which Swell this is, and which messages it speaks."""

SWELL_VERSION = "0.1.0"
"""The version of this package; pyproject.toml reads it from here."""

PROTOCOL_VERSION = 3
"""Grows with every change of `engine.shared.messages` that an older process would misunderstand.

Fields appended with a default that means what their absence meant before do not change it.
Processes of different versions of Swell work together as long as this is the same.
"""
