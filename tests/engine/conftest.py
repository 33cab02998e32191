"""Tiny checkpoints for all tests of models and engines."""

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine.driver import Driver
    from tests.engine.tiny_models import Checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More threads do not speed up tiny tensors, and waiting for a busy core is slow.

    A test can set another number.
    """
    torch = sys.modules.get("torch")  # quick tests of this package have none
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> "Callable[..., Checkpoint]":
    """Return a function that saves a named tiny model once; keywords go to `save_pretrained`.

    Its weights depend on its name alone, not on which tests ran before.
    """
    from tests.engine import tiny_models  # imports transformers

    saved: dict[str, Checkpoint] = {}

    def save(name: str, **options: Any) -> "Checkpoint":
        key = name + str(options)
        if key not in saved:
            directory, seed = tmp_path_factory.mktemp(name), zlib.crc32(key.encode())
            if name in tiny_models.MODELS_WITH_VISION:
                saved[key] = tiny_models.save_tiny_model_with_vision(name, directory, seed)
            else:
                saved[key] = tiny_models.save_tiny_model(name, directory, seed, **options)
        return saved[key]

    return save


@pytest.fixture(scope="session")
def driver() -> "Callable[..., Driver]":
    """Return a function that loads a model directory into a fresh runner."""
    from tests.engine.driver import load_driver  # imports torch

    return load_driver


@pytest.fixture(scope="session")
def prompt() -> Callable[[int], list[int]]:
    """Return a function that creates a deterministic prompt of a given length."""

    def make(length: int) -> list[int]:
        source = random.Random(length)
        return [source.randrange(256) for _ in range(length)]

    return make


@pytest.fixture
def as_kind() -> "Iterator[Callable[[str], None]]":
    """Return a function that simulates another kind of processor."""
    from engine.kernels.processor import VARIABLE, kind  # imports torch

    with pytest.MonkeyPatch.context() as patching:

        def choose(name: str) -> None:
            patching.setenv(VARIABLE, name)
            kind.cache_clear()

        yield choose
    kind.cache_clear()


@pytest.fixture
def as_zen4(as_kind: Callable[[str], None]) -> None:
    """Simulate the kind of processor whose kernels add pairs of bfloat16."""
    as_kind("amd-avx512-bf16")


@pytest.fixture
def avx2_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A simulated processor with only AVX2, which stores 16-bit weights in blocks."""
    from tests.engine.avx2_alone import pretend

    with monkeypatch.context() as patching:
        pretend(patching)
        yield patching


@pytest.fixture
def inference() -> Iterator[None]:
    """Seed the random numbers of every test, and disable gradients."""
    import torch  # quick tests of this package have none

    torch.manual_seed(0)
    with torch.inference_mode():
        yield
