"""Two stacks and an outside router, which has blocks of prompts handed from one to the other."""

import json
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import call, completion
from tests.support.metrics import total
from tests.support.ports import port_of_a_coordinator
from tests.support.waiting import until

pytestmark = pytest.mark.stack

PROMPT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar. " * 6
ASKS = {"do_remote_decode": True, "do_remote_prefill": False}
NOTHING = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
"""Which the toy proxy sends, too."""


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningStack, RunningStack]]:
    """A stack that computes prompts, and one that answers."""
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text("a shared secret of these tests")

    def stack(*role: str) -> RunningStack:
        return RunningStack(
            "--data-parallel-address", "127.0.0.1",
            "--data-parallel-rpc-port", str(port_of_a_coordinator()),
            "--cluster-key-file", str(key), "--dtype", "float32", "--batch-invariant",
            "--data-parallel-size", "1", "--allow-kv-transfer-params", *role,
        )  # fmt: skip

    first = stack("--kv-role", "prefill")
    second = stack("--kv-transfer-config", '{"kv_role": "kv_consumer"}')
    with ExitStack() as running, ThreadPoolExecutor(2) as starting:
        list(starting.map(running.enter_context, (first, second)))
        yield first, second


def ask(stack: RunningStack, prompt: str, tokens: int, params: object = None) -> dict[str, object]:
    body = completion(prompt, tokens, temperature=0) | {"kv_transfer_params": params}
    answer: dict[str, object] = call(f"{stack.url}/v1/completions", body)
    return answer


def text(answer: dict[str, object]) -> object:
    choices = answer["choices"]
    assert isinstance(choices, list)
    return choices[0]["text"]


def test_answer_continues_from_blocks_of_another_stack(
    stacks: tuple[RunningStack, RunningStack],
) -> None:
    first, second = stacks
    expected = text(ask(first, PROMPT, 30))
    params = ask(first, PROMPT, 1, ASKS)["kv_transfer_params"]
    assert text(ask(second, PROMPT, 30, params)) == expected
    until(lambda: total(second.url, "kv_transfer_hits_total") > 100, "blocks were read")
    assert total(second.url, "kv_transfer_failures_total") == 0


def through_proxy(
    stacks: tuple[RunningStack, RunningStack], path: str, body: dict[str, Any]
) -> bytes:
    """Send a client's request as the toy proxy of vLLM's NIXL tests does; return what came."""
    first, second = stacks
    headers = {"Authorization": "Bearer None", "X-Request-Id": str(uuid.uuid4())}
    prefill = {
        each: value
        for each, value in body.items()
        if each not in ("stream_options", "min_tokens", "min_completion_tokens")
    }
    prefill |= {"stream": False, "max_tokens": 1, "kv_transfer_params": ASKS | NOTHING}
    if "max_completion_tokens" in prefill:
        prefill["max_completion_tokens"] = 1
    with httpx.Client(timeout=60, headers=headers) as client:
        answer = client.post(first.url + path, json=prefill)
        answer.raise_for_status()
        params = answer.json()["kv_transfer_params"]
        assert params, "the prefill server offers blocks"
        decode = body | {"kv_transfer_params": params}
        with client.stream("POST", second.url + path, json=decode) as stream:
            stream.raise_for_status()
            return b"".join(stream.iter_bytes())


def deltas(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, which has to be whole."""
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_toy_proxy_gets_a_full_completion(stacks: tuple[RunningStack, RunningStack]) -> None:
    body = completion(f"A proxy: {PROMPT}", 30, min_tokens=5, temperature=0)
    expected = text(call(f"{stacks[0].url}/v1/completions", body))
    hits = total(stacks[1].url, "kv_transfer_hits_total")
    failures = total(stacks[1].url, "kv_transfer_failures_total")
    assert text(json.loads(through_proxy(stacks, "/v1/completions", body))) == expected
    until(lambda: total(stacks[1].url, "kv_transfer_hits_total") > hits, "blocks were read")
    assert total(stacks[1].url, "kv_transfer_failures_total") == failures


def test_toy_proxy_gets_a_full_chat_stream(
    stacks: tuple[RunningStack, RunningStack],
) -> None:
    path = "/v1/chat/completions"
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "max_completion_tokens": 30, "temperature": 0}
    expected = call(stacks[0].url + path, body)
    failures = total(stacks[1].url, "kv_transfer_failures_total")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = deltas(through_proxy(stacks, path, body | options))
    parts = [each["delta"].get("content") for event in events for each in event["choices"]]
    assert "".join(part or "" for part in parts) == expected["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert total(stacks[1].url, "kv_transfer_failures_total") == failures


def test_answer_is_the_same_after_prefill_engine_is_killed(
    stacks: tuple[RunningStack, RunningStack],
) -> None:
    first, second = stacks
    prompt = f"Once more: {PROMPT}"
    expected = text(ask(first, prompt, 30))
    params = ask(first, prompt, 1, ASKS)["kv_transfer_params"]
    engine = first.processes()["engine 0"]
    engine.send_signal(signal.SIGKILL)
    engine.wait(30)
    assert text(ask(second, prompt, 30, params)) == expected
    until(lambda: total(second.url, "kv_transfer_failures_total") == 1, "nothing was read")
