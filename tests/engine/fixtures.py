"""What the fixtures of conftest.py are, for annotations."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tests.engine.driver import Driver
    from tests.engine.tiny_models import Checkpoint

SaveModel: TypeAlias = "Callable[..., Checkpoint]"
"""Saves a named tiny model."""
LoadDriver: TypeAlias = "Callable[..., Driver]"
"""Loads a model directory into a fresh runner."""
AsKind: TypeAlias = Callable[[str], None]
"""Takes this processor for one of another kind."""
MakePrompt: TypeAlias = Callable[[int], list[int]]
"""Makes a prompt of so many tokens."""
