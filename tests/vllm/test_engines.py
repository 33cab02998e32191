"""Engines of vLLM behind this stack: they generate what plain vLLM does, and are replaced."""

import json
import signal
import threading
import time
from collections import defaultdict
from typing import Any

import httpx
import pytest

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL_NAME
from tests.support.http import are_replaced, call, fetch, incarnations, ready_ranks
from tests.support.load import Load
from tests.support.metrics import metric
from tests.support.waiting import until
from tests.vllm.stacks import SCHEMA, START_WITHIN, complete, plain_vllm, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.stack]


def seen(answer: Any) -> dict[str, Any]:
    """Return what an answer says, its log probabilities apart and by size for each token."""
    (choice,) = answer["choices"]
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    usage = {name: answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")}
    return {name: choice[name] for name in names} | usage


def test_answers_equal_plain_vllm(served: RunningStack) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "max_tokens": 24, "logprobs": 3}
    constrained = {**fields, "max_tokens": 60, "structured_outputs": {"json": SCHEMA}}
    asked = [(prompt, fields) for prompt in prompts(50)]
    asked += [(prompt, constrained) for prompt in prompts(20)]
    with plain_vllm() as plain:
        for prompt, wanted in asked:
            expected, got = (complete(url, prompt, **wanted) for url in (plain, served.url))
            assert seen(got) == seen(expected)
            theirs, ours = (each["choices"][0]["logprobs"] for each in (expected, got))
            assert ours["tokens"] == theirs["tokens"]
            assert ours["text_offset"] == theirs["text_offset"]
            assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-3)
            for mine, others in zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True):
                assert mine == pytest.approx(others, abs=1e-3)


def test_logprobs_are_reported_for_each_token(served: RunningStack) -> None:
    answer = complete(served.url, prompts(1)[0], max_tokens=5, logprobs=3, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(prompts(1)[0]) + 5
    assert all(each <= 0 for each in logprobs["token_logprobs"][1:])
    assert all(len(each) >= 3 for each in logprobs["top_logprobs"][1:])


def test_unsupported_settings_of_vllm_engines_are_refused_by_name(served: RunningStack) -> None:
    grammar = {"json": SCHEMA, "whitespace_pattern": "[ ]?"}
    response = complete(served.url, prompts(1)[0], structured_outputs=grammar)
    assert response.status_code == 400
    assert "whitespace_pattern" in response.json()["error"]["message"]


STREAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "repetition_penalty": 1.1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    {"n": 2, "temperature": 1.0},
]
"""What the streams ask for in turn."""
GREEDY, GRAMMAR = 0, 3


class Stream:
    """A streamed answer: the tokens and texts of its choices, and the longest pause in seconds."""

    def __init__(self) -> None:
        self.texts, self.token_ids = defaultdict[int, str](str), defaultdict[int, list[int]](list)
        self.tokens, self.pause = 0, 0.0

    def run(self, url: str, fields: dict[str, Any], begun: threading.Barrier) -> None:
        """Ask, and go on after the first tokens when all others have theirs."""
        body = {"model": BUNDLED_MODEL_NAME, "prompt": prompts(1)[0], "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}, **fields}  # fmt: skip
        last = 0.0
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as lines:
            for line in lines.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    self.texts[choice["index"]] += choice["text"]
                    self.token_ids[choice["index"]] += choice["token_ids"]
                if not chunk["choices"]:
                    self.tokens = chunk["usage"]["completion_tokens"]
                if not last:
                    begun.wait(300)
                else:
                    self.pause = max(self.pause, time.monotonic() - last)
                last = time.monotonic()


def test_streams_survive_the_death_of_an_engine(served: RunningStack) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    [greedy] = complete(served.url, prompts(1)[0], logprobs=2, **asked)["choices"]
    best = [each.values() for each in greedy["logprobs"]["top_logprobs"]]
    close = [max(each) - min(each) < 1e-3 for each in best]
    certain = [*close, True].index(True)
    """Tokens up to where the rounding of other batches may choose another one."""
    streams, begun = [Stream() for _ in range(32)], threading.Barrier(33)
    threads = [
        threading.Thread(
            target=stream.run,
            args=(served.url, {**asked, "seed": number, **STREAMS[number % 5]}, begun),
        )
        for number, stream in enumerate(streams)
    ]
    for each in threads:
        each.start()
    victim = served.processes()["engine 1"]
    begun.wait(300)
    victim.send_signal(signal.SIGKILL)
    for each in threads:
        each.join(300)
    print(f"longest pause: {max(each.pause for each in streams):.2f} s")
    for number, stream in enumerate(streams):
        kind, ids = number % 5, [stream.token_ids[index] for index in sorted(stream.token_ids)]
        assert stream.tokens == sum(map(len, ids)), number
        if kind == GRAMMAR:
            assert set(json.loads(stream.texts[0])) == {"name", "old"}
        else:
            assert [len(each) for each in ids] == [200] * STREAMS[kind].get("n", 1), number
        if kind == GREEDY:
            assert ids[0][:certain] == greedy["token_ids"][:certain]

    until(lambda: ready_ranks(served.url) == {0, 1}, "it is back", within=START_WITHIN)
    assert served.processes()["engine 1"].pid != victim.pid
    served_before = metric(served.url, "generation_tokens_total")["1"]

    def has_traffic() -> bool:
        complete(served.url, prompts(1)[0], max_tokens=4)
        return metric(served.url, "generation_tokens_total")["1"] > served_before

    until(has_traffic, "it has traffic")


def test_long_prompts_with_seeds_are_answered(
    served: RunningStack,
) -> None:
    before = incarnations(served.url, range(2))
    long = (prompts(1)[0] * 500)[:500]
    asked: list[Any] = [[number, *long] for number in range(48)]
    answer = complete(served.url, asked, temperature=1.0, seed=1, max_tokens=4)
    assert answer["usage"]["completion_tokens"] == 4 * 48
    assert incarnations(served.url, range(2)) == before


def test_engines_are_drained_paused_added_and_replaced_under_load(served: RunningStack) -> None:
    def wait_for(size: int) -> None:
        """A vLLM engine takes longer to start than others."""
        until(
            lambda: ready_ranks(served.url) == set(range(size)),
            f"{size} engines", within=START_WITHIN,
        )  # fmt: skip

    wait_for(2)
    with Load(served.url, 6).running() as load:
        call(f"{served.url}/pause?mode=wait", {})
        until(lambda: call(f"{served.url}/is_paused")["is_paused"], "those that run have ended")
        call(f"{served.url}/resume", {})
        load.goes_on()
        for size in (1, 2):  # the one that leaves is drained
            call(f"{served.url}/admin/scale", {"data_parallel_size": size})
            wait_for(size)
            load.goes_on()
        old = incarnations(served.url, range(2))
        call(f"{served.url}/admin/restart", {})
        until(
            lambda: are_replaced(served.url, old, range(2)),
            "all are other processes", within=2 * START_WITHIN,
        )  # fmt: skip
        load.goes_on()
    assert not load.errors


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]}]}),
    ],
)  # fmt: skip
def test_vectors_and_images_are_refused(
    served: RunningStack, path: str, body: dict[str, Any]
) -> None:
    answer = fetch(f"{served.url}{path}", {"model": BUNDLED_MODEL_NAME, **body})
    assert answer.status in (400, 404), answer
    assert answer.error["message"]
