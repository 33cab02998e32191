"""Types of the fixtures in conftest.py."""

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
"""Simulates another kind of processor."""
MakePrompt: TypeAlias = Callable[[int], list[int]]
"""Creates a prompt of the given length."""
