"""Images reach engines of vLLM whole, and vLLM's own processor and encoder see them."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from benchmarks.running_stack import RunningStack
from tests.server.media.pictures import data_url, encoded, picture
from tests.server.media.vision_models import save_vision_model
from tests.support.http import call
from tests.support.metrics import metric
from tests.vllm.stacks import plain_vllm, vllm_stack

pytestmark = [pytest.mark.vllm, pytest.mark.stack]

BLACK, WHITE, RED = (Image.new("RGB", (32, 40), each) for each in ("black", "white", "red"))
ASKED = {"model": "tiny", "temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights; vLLM has no attention on CPUs for heads as small as others'."""
    directory = tmp_path_factory.mktemp("idefics3")
    save_vision_model("idefics3", directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 512,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def seeing(model: Path) -> Iterator[RunningStack]:
    limit = ("--limit-mm-per-prompt", '{"image": 3}')
    with vllm_stack("--model", str(model), "--served-model-name", "tiny", *limit) as running:
        yield running


def conversation(*images: Image.Image) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(encoded(each))}} for each in images
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is this"}]}]


def answer(url: str, *images: Image.Image, **fields: Any) -> Any:
    body = {**ASKED, "messages": conversation(*images), "return_token_ids": True, **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    return response.json() if response.is_success else response


def tokens(said: Any) -> list[int]:
    found: list[int] = said["choices"][0]["token_ids"]
    return found


def test_answers_about_images_equal_plain_vllm(seeing: RunningStack, model: Path) -> None:
    shown = [(), (BLACK,), (WHITE,), (picture(40, 20),), (RED, BLACK), (BLACK, RED)]
    got = [answer(seeing.url, *each) for each in shown]
    with plain_vllm(model, "tiny") as plain:
        expected = [answer(plain, *each) for each in shown]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine["prompt_token_ids"] == theirs["prompt_token_ids"]
        assert mine["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
        assert tokens(mine) == tokens(theirs)
    assert len({tuple(tokens(each)) for each in got}) == len(shown)


def test_image_is_sent_once_to_each_engine(seeing: RunningStack) -> None:
    image = picture(24, 56, seed=5)

    def counted(name: str) -> float:
        return sum(metric(seeing.url, f"mm_cache_{name}_total").values())

    queries, hits = counted("queries"), counted("hits")
    first, *others = [tokens(answer(seeing.url, image)) for _ in range(4)]
    assert others == [first] * 3
    both = answer(seeing.url, image, n=2)["choices"]
    assert [each["token_ids"] for each in both] == [first] * 2
    assert counted("queries") - queries == 6
    assert counted("hits") - hits >= 4


def test_invalid_and_too_many_images_are_refused(seeing: RunningStack) -> None:
    content = encoded(picture(40, 40))
    part = {"type": "image_url", "image_url": {"url": data_url(content[: len(content) // 2])}}
    broken = answer(seeing.url, messages=[{"role": "user", "content": [part]}])
    assert broken.status_code == 400
    assert broken.json()["error"]["code"] == "invalid_image"
    assert broken.json()["error"]["param"] == "messages[0].content[0]"
    many = answer(seeing.url, *[BLACK] * 4)
    assert many.status_code == 400
    assert many.json()["error"]["code"] == "too_many_images"


class Stream:
    """A streamed answer about an image."""

    def __init__(self, url: str, image: Image.Image, length: int) -> None:
        self.token_ids: list[int] = []
        self.begun = threading.Event()
        self._url = url
        self._body = {
            **ASKED, "messages": conversation(image), "max_tokens": length, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        asked = f"{self._url}/v1/chat/completions"
        with httpx.stream("POST", asked, json=self._body, timeout=300) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        self.token_ids += choice.get("token_ids") or []
                if self.token_ids:
                    self.begun.set()


def test_streams_about_images_survive_the_death_of_an_engine(seeing: RunningStack) -> None:
    images, length = (BLACK, WHITE, RED, picture(40, 20)), 300
    certain = []
    for image in images:
        said = answer(seeing.url, image, max_tokens=length, logprobs=True, top_logprobs=2)
        best = [each["top_logprobs"] for each in said["choices"][0]["logprobs"]["content"]]
        close = [each[0]["logprob"] - each[1]["logprob"] < 1e-3 for each in best]
        # Beyond these the rounding of other batches may choose another one.
        certain.append(tokens(said)[: [*close, True].index(True)])
    streams = [Stream(seeing.url, image, length) for image in images]
    for each in streams:
        assert each.begun.wait(300)
    # What is halted is not over before the engine dies.
    call(f"{seeing.url}/pause?mode=keep", {})
    seeing.processes()["engine 1"].send_signal(signal.SIGKILL)
    call(f"{seeing.url}/resume", {})
    for each, expected in zip(streams, certain, strict=True):
        each.thread.join(300)
        assert len(each.token_ids) == length
        assert each.token_ids[: len(expected)] == expected
