"""Engines of vLLM behind this stack: they generate what plain vLLM does, and are replaced."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME
from tests.support.http import call, ready_ranks
from tests.support.load import Load
from tests.support.waiting import until
from tests.vllm.stacks import ENVIRONMENT, GRAMMARS, PYTHON, SCHEMA, complete, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.stack]


def test_texts_and_tokens_are_those_of_plain_vllm(served: RunningStack, tmp_path: Path) -> None:
    requests = [
        {"prompt": each, "sampling": {"temperature": 0, "max_tokens": 24, "logprobs": 3}}
        for each in prompts(50)
    ]
    requests += [
        {"prompt": each, "sampling": {"temperature": 0, "max_tokens": 60}, "schema": SCHEMA}
        for each in prompts(20)
    ]
    arguments = {"max_model_len": 512, "enforce_eager": True, "dtype": "float32", **GRAMMARS}
    wanted = {"model": str(BUNDLED_MODEL), "arguments": arguments, "requests": requests}
    results = tmp_path / "plain.jsonl"
    subprocess.run(
        [PYTHON, "-P", Path(__file__).with_name("plain.py"), results],
        input=json.dumps(wanted), text=True, check=True, timeout=600,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    plain = [json.loads(line) for line in results.read_text().splitlines()]
    for request, expected in zip(requests, plain, strict=True):
        fields: dict[str, Any] = {**request["sampling"]}  # type: ignore[dict-item]
        logprobs = expected.pop("logprobs", None)
        if "schema" in request:
            fields["structured_outputs"] = {"json": SCHEMA}
        answer = complete(served.url, request["prompt"], return_token_ids=True, **fields)  # type: ignore[arg-type]
        choice = answer["choices"][0]
        got = {name: choice[name] for name in ("text", "token_ids", "finish_reason")}
        assert got == expected
        if logprobs is not None:
            told = choice["logprobs"]
            assert told["token_logprobs"] == pytest.approx([own for own, _ in logprobs], abs=1e-3)
            for step, (_, alternatives) in zip(told["top_logprobs"], logprobs, strict=True):
                for each in step.values():
                    assert min(abs(each - other) for other in alternatives) < 1e-3
        usage = {name: answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion")}
        total = len(request["prompt"]) + len(expected["token_ids"])
        assert usage == {"prompt": len(request["prompt"]), "completion": len(expected["token_ids"])}
        assert answer["usage"]["total_tokens"] == total


def test_logprobs_are_reported_for_each_token(served: RunningStack) -> None:
    answer = complete(served.url, prompts(1)[0], max_tokens=5, logprobs=3, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(prompts(1)[0]) + 5
    assert all(each <= 0 for each in logprobs["token_logprobs"][1:])
    assert all(len(each) >= 3 for each in logprobs["top_logprobs"][1:])


def test_what_vllm_engines_cannot_do_is_refused_by_name(served: RunningStack) -> None:
    grammar = {"json": SCHEMA, "whitespace_pattern": "[ ]?"}
    response = complete(served.url, prompts(1)[0], structured_outputs=grammar)
    assert response.status_code == 400
    assert "whitespace_pattern" in response.json()["error"]["message"]


def test_streams_survive_the_death_of_an_engine(served: RunningStack) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    [greedy] = complete(served.url, prompts(1)[0], logprobs=2, **asked)["choices"]
    best = [each.values() for each in greedy["logprobs"]["top_logprobs"]]
    close = [max(each) - min(each) < 1e-3 for each in best]
    certain = [*close, True].index(True)
    """Tokens up to where the rounding of other batches may choose another one."""
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    begun = threading.Barrier(33)

    def stream(number: int) -> None:
        fields = {**asked}
        if number % 4 == 1:
            fields.update(temperature=1.0, seed=number, repetition_penalty=1.1)
        if number % 4 == 2:
            fields.update(structured_outputs={"json": SCHEMA}, ignore_eos=False)
        body = {"model": BUNDLED_MODEL_NAME, "prompt": prompts(1)[0], "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}, **fields}  # fmt: skip
        told, told_ids, tokens = "", list[int](), 0
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=300) as lines:
            waits = True
            for line in lines.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                if chunk["choices"]:
                    told += chunk["choices"][0]["text"]
                    told_ids += chunk["choices"][0]["token_ids"]
                else:
                    tokens = chunk["usage"]["completion_tokens"]
                if waits:
                    waits = False
                    begun.wait(300)
        assert tokens == len(told_ids)
        if number % 4 != 2:
            assert tokens == 200
        texts[number], token_ids[number] = told, told_ids

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(32)]
    for each in threads:
        each.start()
    victim = served.processes()["engine 1"]
    begun.wait(300)
    victim.send_signal(signal.SIGKILL)
    for each in threads:
        each.join(300)
    assert len(texts) == 32
    for number in range(0, 32, 4):
        assert token_ids[number][:certain] == greedy["token_ids"][:certain]
    for number in range(2, 32, 4):
        assert set(json.loads(texts[number])) == {"name", "old"}

    def is_back() -> bool:
        engine = served.processes().get("engine 1")
        return engine is not None and engine.pid != victim.pid

    until(is_back, "it is replaced")


def test_engines_are_drained_paused_and_added_under_load(served: RunningStack) -> None:
    def wait_for(size: int) -> None:
        """A vLLM engine takes longer to start than others."""
        until(lambda: ready_ranks(served.url) == set(range(size)), f"{size} engines", within=600)

    wait_for(2)
    with Load(served.url, 6).running() as load:
        call(f"{served.url}/pause?mode=wait", {})
        until(lambda: call(f"{served.url}/is_paused")["is_paused"], "those that run have ended")
        call(f"{served.url}/resume", {})
        load.goes_on()
        for size in (1, 2):
            call(f"{served.url}/admin/scale", {"data_parallel_size": size})
            wait_for(size)
            load.goes_on()
    assert not load.errors
