"""Weights that are replaced while a whole stack serves."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.running_stack import RunningStack
from engine.shared.config.model import BUNDLED_MODEL
from tests.support.http import (
    ADMIN_KEY,
    Answer,
    are_replaced,
    call,
    completion,
    everywhere,
    fetch,
    incarnations,
)
from tests.support.lockstep import infos, weight_versions
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

STREAMS = 64
TOKENS = 60


def checkpoint(directory: Path, seed: int) -> str:
    """Write a copy of the bundled model with other weights."""
    shutil.copytree(BUNDLED_MODEL, directory)
    generator = torch.Generator().manual_seed(seed)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() + 0.05 * noise).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return str(directory)


def greedy(url: str, rank: int | None = None) -> Answer:
    body = completion("To be, or not to be", 12) | {"temperature": 0}
    return fetch(f"{url}/v1/completions", body, rank=rank)


def text(answer: Answer) -> str:
    assert answer.status == 200, answer
    shown: str = json.loads(answer.text)["choices"][0]["text"]
    return shown


def update(url: str, model: str, version: str, mode: str) -> Answer:
    return fetch(f"{url}/admin/weights", {"model": model, "weight_version": version, "mode": mode})


@pytest.mark.slow
def test_weights_are_replaced_under_streams_and_outlive_engines(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "one", 1), checkpoint(tmp_path / "two", 2)
    (tmp_path / "broken").mkdir()
    flags = (
        "--dtype", "float32", "--admin-key", ADMIN_KEY, "--data-parallel-size", "2",
        "--api-server-count", "2", "--min-ready-engines", "2", "--num-kv-blocks", "1024",
        "--weights-dir", str(tmp_path), "--allow-rank-pinning",
    )  # fmt: skip
    with RunningStack(*flags) as stack, ThreadPoolExecutor(STREAMS) as pool:
        url = stack.url
        first = greedy(url)
        assert first.headers["x-weight-version"] is None
        texts = {"": text(first)}

        def stream(number: int) -> dict[str, Any]:
            return call(f"{url}/v1/completions", completion(f"To be {number}", TOKENS))

        for version, model, mode in (("one", one, "rolling"), ("two", two, "in_place")):
            answers = [pool.submit(stream, number) for number in range(STREAMS)]
            until(
                lambda: (
                    sum(info["running"] for info in infos(url).values()) > 4
                    or all(answer.done() for answer in answers)  # noqa: B023
                ),
                "they run, or have run",
            )
            done = update(url, model, version, mode)
            assert done.status == 200, done
            assert json.loads(done.text)["engines"] == [0, 1]
            for answer in answers:
                usage = answer.result(timeout=PATIENCE)["usage"]
                assert usage["completion_tokens"] == TOKENS
            assert weight_versions(url) == {0: version, 1: version}
            for rank in (0, 1):
                told = greedy(url, rank)
                assert told.headers["x-weight-version"] == version
                assert texts.setdefault(version, text(told)) == text(told)
        assert len(set(texts.values())) == 3, "each has its own, and none a cached prefix"

        refused = update(url, str(tmp_path / "broken"), "three", "rolling")
        assert (refused.status, refused.error["param"]) == (400, "model")
        assert weight_versions(url) == {0: "two", 1: "two"}
        refused = update(url, "/etc", "three", "rolling")
        assert "--weights-dir" in refused.error["message"]

        before = incarnations(url, range(2))
        stack.processes()["engine 0"].kill()
        until(lambda: are_replaced(url, before, [0]), "it is replaced")
        until(
            lambda: everywhere(lambda: weight_versions(url) == {0: "two", 1: "two"}),
            "its successor has the weights of the others",
        )
        assert text(greedy(url, 0)) == texts["two"]
