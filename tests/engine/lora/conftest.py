"""Adapters of the tiny models, made with PEFT."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine.lora.adapters import Trained
    from tests.engine.tiny_models import Checkpoint


@pytest.fixture(scope="session")
def trained(
    checkpoint: "Callable[..., Checkpoint]", tmp_path_factory: pytest.TempPathFactory
) -> "Callable[..., Trained]":
    """Return a function that saves an adapter of a named tiny model; keywords are LoraConfig's."""
    from tests.engine.lora.adapters import train  # imports peft

    made: dict[str, Trained] = {}

    def make(name: str, seed: int = 1, **config: Any) -> "Trained":
        key = f"{name} {seed} {config}"
        if key not in made:
            directory = tmp_path_factory.mktemp("adapter")
            made[key] = train(checkpoint(name), directory, seed, **config)
        return made[key]

    return make
