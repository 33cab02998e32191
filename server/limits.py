"""What one request may cost at most: the bounds of fields that no setting changes.

Each is a price: bytes, objects, sequences or tokens that a client may make a process hold or work
through. Bounds that operators set are in `server.config`, those of grammars in
`engine.grammar_spec`. docs/security.md lists all of them.
"""

MAX_CHOICES = 128
"""`n` of a request: choices per prompt."""
MAX_PROMPTS = 2048
"""Prompts of a completion request."""
MAX_SEQUENCES = 2048
"""Sequences of a request: prompts times choices."""
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
MAX_TOOLS = 128
"""Tools that a request offers to the model."""
MAX_CACHE_SALT = 256
"""Characters of `cache_salt`."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""Range of seeds."""
