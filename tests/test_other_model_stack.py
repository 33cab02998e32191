"""A model exchanged under running front ends: they never answer with another model's tokens."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL
from tests.support.commands import coordinator, swell
from tests.support.http import complete, completion, fetch, ready_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.stack


@pytest.fixture
def join(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A coordinator; the flags with which others find it."""
    with coordinator(tmp_path, "--heartbeat-interval", "0.2") as flags:
        yield flags


def engine(model: Path, join: tuple[str, ...]) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    return swell("engine", str(model), "--executor", "simulated", *join)


def test_front_ends_wait_while_engines_have_another_model(
    join: tuple[str, ...], tmp_path: Path
) -> None:
    other = tmp_path / BUNDLED_MODEL.name
    shutil.copytree(BUNDLED_MODEL, other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with ExitStack() as running:

        def status() -> int:
            return fetch(f"{url}/v1/completions", completion("Act", 2)).status

        with engine(BUNDLED_MODEL, join):
            front = RunningStack(*join, "--api-server-count", "2", command="api-server")
            url = running.enter_context(front).url
            for _ in range(2):
                complete(url, "Act", 2)
        with engine(other, join):
            until(
                lambda: sum("tokenizer is '" in line for line in front.lines) >= 2,
                "both front ends say why they were sent away",
            )
            assert status() == 503
        with engine(BUNDLED_MODEL, join):
            until(lambda: ready_ranks(url), "the engine is seen")
            until(lambda: status() == 200, "front ends serve again")
    said = [line for line in front.lines if "which keeps retrying" in line]
    assert len(said) == 2, "each says it once"
