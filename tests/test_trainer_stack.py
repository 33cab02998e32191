"""A trainer that sends weights into a whole stack while it serves."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
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
from tests.support.lockstep import utility, weight_versions
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

STREAMS = 16
TOKENS = 60
VERSION = "x-weight-version"


def changed(seed: int) -> dict[str, Tensor]:
    """Return weights of the bundled model with noise."""
    generator = torch.Generator().manual_seed(seed)
    stored = load_file(BUNDLED_MODEL / "model.safetensors")
    return {
        name: each.float() + 0.05 * torch.randn(each.shape, generator=generator)
        for name, each in stored.items()
    }


def greedy(url: str, rank: int) -> tuple[str | None, str]:
    """Return what an engine says, and of which weights."""
    body = completion("To be, or not to be", 12) | {"temperature": 0}
    answer = fetch(f"{url}/v1/completions", body, rank=rank)
    assert answer.status == 200, answer
    return answer.headers[VERSION], json.loads(answer.text)["choices"][0]["text"]


def halted(url: str) -> dict[int, bool]:
    """Return which engines are halted."""
    return {each["rank"]: each["halted"] for each in call(f"{url}/admin/engines")["engines"]}


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


@pytest.mark.slow
def test_engines_follow_a_trainer_and_lose_nothing_when_it_dies() -> None:
    flags = (
        "--dtype", "float32", "--admin-key", ADMIN_KEY, "--data-parallel-size", "2",
        "--api-server-count", "2", "--min-ready-engines", "2", "--num-kv-blocks", "1024",
        "--allow-rank-pinning",
    )  # fmt: skip
    with RunningStack(*flags) as stack, ThreadPoolExecutor(STREAMS) as pool:
        url = stack.url
        assert fetch(f"{url}/update_weights", {"update_info": {}}, key="wrong").status == 403
        texts = {"": greedy(url, 0)[1]}

        def stream(number: int) -> int:
            answer = fetch(f"{url}/v1/completions", completion(f"To be {number}", TOKENS))
            return int(json.loads(answer.text)["usage"]["completion_tokens"])

        sender = WeightSender(url, ADMIN_KEY, timeout=PATIENCE)
        for version in ("one", "two"):
            answers = [pool.submit(stream, number) for number in range(STREAMS)]
            sender.send(changed(len(texts)), version)
            assert {answer.result(PATIENCE) for answer in answers} == {TOKENS}
            assert weight_versions(url) == {0: version, 1: version}
            said = {greedy(url, rank) for rank in (0, 1)}
            [(told, texts[version])] = said
            assert told == version
        assert len(set(texts.values())) == 3, "each has its own, and none a cached prefix"

        lost = part_of_an_update(url, sender, changed(3))
        assert (lost.status, lost.error["code"]) == (400, "trainer_lost")
        assert greedy(url, 0) == greedy(url, 1) == ("two", texts["two"])
        refused = fetch(f"{url}/finish_weight_update", {"weight_version": "three"})
        assert refused.status == 400
        assert weight_versions(url) == {0: "two", 1: "two"}

        sender = WeightSender(url, ADMIN_KEY, timeout=PATIENCE)
        before = incarnations(url, range(2))
        stack.processes()["engine 1"].kill()
        until(lambda: are_replaced(url, before, [1]), "it is replaced")
        with pytest.raises(TransferFailed, match=r"has not joined|by peer"):
            sender.send(changed(1), "one")
        until(
            lambda: everywhere(lambda: weight_versions(url) == {0: "two", 1: ""}),
            "one has its weights, the other waits for them",
        )
        assert set(halted(url).values()) == {True, False}, "requests go to the first"
        assert fetch(f"{url}/v1/completions", completion("To be", 1)).headers[VERSION] == "two"
        with WeightSender(url, ADMIN_KEY, timeout=PATIENCE) as sender:
            sender.send(changed(1), "one")
        assert {greedy(url, rank) for rank in (0, 1)} == {("one", texts["one"])}
