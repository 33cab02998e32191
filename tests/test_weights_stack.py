"""Weights that are replaced while a whole stack serves, by checkpoints and by a trainer."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.running_stack import RunningStack
from engine.shared.config.model import BUNDLED_MODEL
from swell.trainer import TransferFailed, WeightSender
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
from tests.support.lockstep import infos, utility, weight_versions
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TOKENS = 60
VERSION = "x-weight-version"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def stack(directory: Path) -> Iterator[RunningStack]:
    """Two engines, whose weights stay replaced from one test to the next."""
    with RunningStack(
        "--dtype", "float32", "--admin-key", ADMIN_KEY, "--data-parallel-size", "2",
        "--api-server-count", "2", "--min-ready-engines", "2", "--num-kv-blocks", "1024",
        "--weights-dir", str(directory), "--allow-rank-pinning",
    ) as running:  # fmt: skip
        yield running


def changed(seed: int) -> dict[str, Tensor]:
    """Return weights of the bundled model with noise."""
    generator = torch.Generator().manual_seed(seed)
    stored = load_file(BUNDLED_MODEL / "model.safetensors")
    return {
        name: each.float() + 0.05 * torch.randn(each.shape, generator=generator)
        for name, each in stored.items()
    }


def checkpoint(directory: Path, seed: int) -> str:
    """Write a copy of the bundled model with other weights."""
    shutil.copytree(BUNDLED_MODEL, directory)
    save_file(changed(seed), directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def greedy(url: str, rank: int) -> tuple[str | None, str]:
    """Return what an engine says, and of which weights."""
    body = completion("To be, or not to be", 12) | {"temperature": 0}
    answer = fetch(f"{url}/v1/completions", body, rank=rank)
    assert answer.status == 200, answer
    return answer.headers[VERSION], json.loads(answer.text)["choices"][0]["text"]


def update(url: str, model: str, version: str, mode: str) -> Answer:
    return fetch(f"{url}/admin/weights", {"model": model, "weight_version": version, "mode": mode})


def replace_under_streams(url: str, streams: int, version: str, replace: Callable[[], None]) -> str:
    """Replace the weights while requests run, none of which is cut; return what engines say now."""

    def stream(number: int) -> int:
        answer = call(f"{url}/v1/completions", completion(f"To be {number}", TOKENS))
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(streams) as pool:
        answers = [pool.submit(stream, number) for number in range(streams)]
        until(
            lambda: (
                sum(info["running"] for info in infos(url).values()) > 4
                or all(answer.done() for answer in answers)
            ),
            "they run, or have run",
        )
        replace()
        assert {answer.result(PATIENCE) for answer in answers} == {TOKENS}
    assert weight_versions(url) == {0: version, 1: version}
    [(told, text)] = {greedy(url, rank) for rank in (0, 1)}
    assert told == version
    return text


def test_checkpoints_are_loaded_during_streams_and_survive_restarts(
    stack: RunningStack, directory: Path
) -> None:
    url = stack.url
    told, text = greedy(url, 0)
    assert told is None
    texts = {text}
    for version, mode in (("one", "rolling"), ("two", "in_place")):
        model = checkpoint(directory / version, len(texts))

        def load(version: str = version, mode: str = mode, model: str = model) -> None:
            done = update(url, model, version, mode)
            assert done.status == 200, done
            assert json.loads(done.text)["engines"] == [0, 1]

        text = replace_under_streams(url, 24, version, load)
        texts.add(text)
    assert len(texts) == 3, "each has its own, and none a cached prefix"

    (directory / "broken").mkdir()
    refused = update(url, str(directory / "broken"), "three", "rolling")
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
    assert greedy(url, 0) == ("two", text)


def part_of_an_update(url: str, sender: WeightSender, weights: dict[str, Tensor]) -> Answer:
    """Begin an update, send one tensor of it, and leave; return what the server says."""
    info = {
        "names": list(weights),
        "dtype_names": ["float32"] * len(weights),
        "shapes": [list(each.shape) for each in weights.values()],
    }
    with ThreadPoolExecutor(1) as calls:
        asked = calls.submit(fetch, f"{url}/update_weights", {"update_info": info})
        assert sender.group is not None
        sender.group.broadcast(next(iter(weights.values())))
        phases = partial(utility, url, "weight_transfer")
        until(
            lambda: {each["phase"] for each in phases().values()} == {"receiving"} or asked.done(),
            "they wait for the rest",
        )
        sender.close()
        return asked.result(PATIENCE)


def test_engines_follow_trainer_and_survive_its_death(stack: RunningStack) -> None:
    url = stack.url
    assert fetch(f"{url}/update_weights", {"update_info": {}}, key="wrong").status == 403
    texts = {"": greedy(url, 0)[1]}
    sender = WeightSender(url, ADMIN_KEY, timeout=PATIENCE)
    for version, seed in (("sent", 3), ("sent-again", 4)):
        send = partial(sender.send, changed(seed), version)
        texts[version] = replace_under_streams(url, 16, version, send)
    assert len(set(texts.values())) == 3, "each has its own, and none a cached prefix"

    last = ("sent-again", texts["sent-again"])
    lost = part_of_an_update(url, sender, changed(5))
    assert (lost.status, lost.error["code"]) == (400, "trainer_lost")
    assert greedy(url, 0) == greedy(url, 1) == last
    refused = fetch(f"{url}/finish_weight_update", {"weight_version": "never"})
    assert refused.status == 400
    assert weight_versions(url) == {0: last[0], 1: last[0]}

    sender = WeightSender(url, ADMIN_KEY, timeout=PATIENCE)
    before = incarnations(url, range(2))
    stack.processes()["engine 1"].kill()
    until(lambda: are_replaced(url, before, [1]), "it is replaced")
    with pytest.raises(TransferFailed, match=r"has not joined|by peer"):
        sender.send(changed(3), "sent")
    until(
        lambda: everywhere(lambda: weight_versions(url) == {0: last[0], 1: ""}),
        "one has its weights, the other waits for them",
    )
    engines = call(f"{url}/admin/engines")["engines"]
    assert [each["halted"] for each in engines] == [False, True], "requests go to the first"
    assert fetch(f"{url}/v1/completions", completion("To be", 1)).headers[VERSION] == last[0]
    with WeightSender(url, ADMIN_KEY, timeout=PATIENCE) as sender:
        sender.send(changed(3), "sent")
    assert {greedy(url, rank) for rank in (0, 1)} == {("sent", texts["sent"])}
