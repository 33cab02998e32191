"""Images in a stack: encoded once for many requests, and seen again when an engine is killed."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.running_stack import RunningStack
from tests.server.media.pictures import data_url, encoded, picture
from tests.server.media.vision_models import save_vision_model
from tests.support.http import call, fetch
from tests.support.metrics import total
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

MANY = 32
TILES = 5
"""Of the picture that is sent."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    directory = tmp_path_factory.mktemp("vision")
    save_vision_model("smolvlm", directory)
    flags = (
        "--model", str(directory), "--dtype", "float32", "--batch-invariant",
        "--data-parallel-size", "2", "--max-model-len", "256", "--num-kv-blocks", "256",
    )  # fmt: skip
    with RunningStack(*flags) as running:
        yield running


def asked(seed: int, text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return a request with a picture."""
    url = data_url(encoded(picture(32, 32, seed=seed)))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    fixed = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": parts}], **fixed, **more}


def said(stack: RunningStack, *arguments: Any) -> str:
    answer = call(f"{stack.url}/v1/chat/completions", asked(*arguments))
    return str(answer["choices"][0]["message"]["content"])


def streamed(stack: RunningStack, *arguments: Any) -> str:
    """Return a streamed answer."""
    got = []
    url, body = f"{stack.url}/v1/chat/completions", asked(*arguments, stream=True)
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                got.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    return "".join(got)


def test_an_image_of_many_requests_is_encoded_once_by_each_engine(stack: RunningStack) -> None:
    with ThreadPoolExecutor(MANY) as pool:
        answers = [pool.submit(said, stack, 7, f"Request {number}", 4) for number in range(MANY)]
        assert all(each.result(PATIENCE) for each in answers)

    until(lambda: total(stack.url, "encoded_images_total") > 0, "engines have told of it")
    saved = "encoder_cache_hits_total", "prefix_cache_hits_total"
    until(lambda: any(total(stack.url, each) > 0 for each in saved), "most found it done")
    assert total(stack.url, "encoded_images_total") <= 2 * TILES
    shown, held = (total(stack.url, f"mm_cache_{each}_total") for each in ("queries", "hits"))
    assert shown >= MANY * TILES
    assert shown - held <= 4 * TILES, "each of two API servers sends it once to each engine"


def test_streams_about_images_move_when_their_engine_is_killed(
    stack: RunningStack,
) -> None:
    asked_for = [(number % 4, f"what {number}", 150) for number in range(16)]
    with ThreadPoolExecutor(len(asked_for)) as pool:
        expected = list(pool.map(lambda asked: said(stack, *asked), asked_for))
    assert len(set(expected)) == len(expected), "images and texts make a difference"
    engine = stack.processes()["engine 0"]
    enough = threading.Event()

    asked_at = [time.monotonic()] * len(asked_for)

    def keep_asking(index: int) -> None:
        while not enough.is_set():
            asked_at[index] = time.monotonic()
            assert streamed(stack, *asked_for[index]) == expected[index]

    with ThreadPoolExecutor(len(expected)) as pool:
        working = [pool.submit(keep_asking, index) for index in range(len(expected))]
        try:
            until(lambda: total(stack.url, "num_requests_running") > 0, "some run")
            engine.send_signal(signal.SIGSTOP)  # answers are so short that it could have none
            until(lambda: time.monotonic() - min(asked_at) > 1, "one is in the stopped engine")
            engine.send_signal(signal.SIGKILL)
            until(lambda: total(stack.url, "requests_resumed_total") > 0, "some go on elsewhere")
        finally:
            enough.set()
        for each in working:
            each.result(PATIENCE)


def test_decompression_bomb_is_refused_and_next_image_is_answered(stack: RunningStack) -> None:
    body = asked(1, "what", 2)
    head = b"IHDR\x00\x00\x00\x01"
    bomb = data_url(encoded(picture(1, 1)).replace(head, b"IHDR\x00\xff\xff\xff"))
    body["messages"][0]["content"][0]["image_url"]["url"] = bomb
    answer = fetch(f"{stack.url}/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["code"] == "invalid_image"
    assert said(stack, 1, "what", 2)
