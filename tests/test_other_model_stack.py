"""A model exchanged under running front ends: they never answer with another model's tokens."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL
from tests.test_nodes_stack import MODEL, SWELL, complete, engines_of, four_free_ports, wait_until

pytestmark = pytest.mark.stack


def status_of_completion(url: str) -> int:
    body = json.dumps({"model": MODEL, "prompt": "Act", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def join(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A coordinator; the flags with which others find it."""
    key = tmp_path / "cluster.key"
    key.write_text("a secret of these tests")
    flags = (
        "--coordinator", f"127.0.0.1:{four_free_ports()}", "--cluster-key-file", str(key),
        "--engine-timeout", "2", "--heartbeat-interval", "0.2",
    )  # fmt: skip
    coordinator = subprocess.Popen([SWELL, "coordinator", *flags], stderr=subprocess.DEVNULL)
    try:
        yield flags
    finally:
        coordinator.terminate()
        assert coordinator.wait(10) == 0


@contextmanager
def engine(model: Path, join: tuple[str, ...]) -> Iterator[None]:
    process = subprocess.Popen(
        [SWELL, "engine", str(model), "--executor", "simulated", *join], stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(15) == 0


def test_front_ends_wait_out_engines_of_another_model_and_serve_again_afterwards(
    join: tuple[str, ...], tmp_path: Path
) -> None:
    other = tmp_path / BUNDLED_MODEL.name
    shutil.copytree(BUNDLED_MODEL, other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with ExitStack() as running:
        with engine(BUNDLED_MODEL, join):
            front = RunningStack(*join, "--api-server-count", "2", command="api-server")
            url = running.enter_context(front).url
            complete(url, 2)
        with engine(other, join):
            wait_until(
                lambda: sum("tokenizer is '" in line for line in front.lines) >= 2,
                "both front ends say why they were sent away",
            )
            assert status_of_completion(url) == 503
            said = [line for line in front.lines if "which keeps asking" in line]
        with engine(BUNDLED_MODEL, join):
            wait_until(lambda: bool(engines_of(url)), "the engine is seen")
            wait_until(lambda: status_of_completion(url) == 200, "front ends serve again")
    assert len(said) == 2, "each says it once"
