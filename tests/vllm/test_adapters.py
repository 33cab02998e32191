"""vLLM engines with adapters, reasoning and operators' calls, beside the built-in engine."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.make_model import SHAPES, write_model
from benchmarks.running_stack import RunningStack
from tests.support.adapter_files import write_adapter
from tests.support.http import call, fetch, ready_ranks
from tests.support.plugins import offer
from tests.support.waiting import until
from tests.vllm.stacks import SCHEMA, START_WITHIN, vllm_stack

pytestmark = [pytest.mark.vllm, pytest.mark.stack]

MODULES = ("q_proj", "v_proj", "down_proj")
PROMPT = [5, 600, 7, 800]
TEMPLATE = (
    "{{ tools or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
EXTENSION = """
def loaded_adapters(worker) -> int:
    return max(map(len, worker.executor.collective_rpc("list_loras")))
"""


class Files(NamedTuple):
    model: Path
    adapters: Path
    traces: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A dense model (vLLM needs Triton for adapters of experts), and adapters of it."""
    root = tmp_path_factory.mktemp("adapted")
    write_model(root / "model", SHAPES["2-layer"])
    options: dict[str, Any] = {"modules": MODULES, "rank": 4, "size": 0.3, "model": root / "model"}
    for seed, name in enumerate(("sql", "law")):
        targets = {"target_modules": list(MODULES)}
        write_adapter(root / "adapters" / name, seed=seed, config=targets, **options)
    write_adapter(root / "adapters" / "untargeted", seed=3, **options)
    (root / "template.jinja").write_text(TEMPLATE)
    offer(root, "swell.worker_extensions", loaded_adapters="probe:loaded_adapters")
    (root / "probe.py").write_text(EXTENSION)
    return Files(root / "model", root / "adapters", root / "traces")


def flags(files: Files) -> tuple[str, ...]:
    return (
        "--model", str(files.model), "--served-model-name", "tiny", "--enable-lora",
        "--max-loras", "2", "--lora-dir", str(files.adapters),
        "--lora-modules", f"sql={files.adapters / 'sql'}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapted(files: Files) -> Iterator[RunningStack]:
    stack = vllm_stack(
        *flags(files), "--reasoning-parser", "deepseek_r1", "--tool-call-parser", "hermes",
        "--chat-template", str(files.model.parent / "template.jinja"),
        "--torch-profiler-dir", str(files.traces), "--worker-extensions", "loaded-adapters",
        "--engine-timeout", "60",  # writing a trace delays heartbeats
        engine_args={
            "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True}
        },
        environment={
            "PYTHONPATH": f"{files.model.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        },
    )  # fmt: skip
    with stack as running:
        yield running


def answer(url: str, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "logprobs": 3, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()


def first_token(url: str, model: str) -> list[float]:
    """Return the log probabilities of the most likely first tokens."""
    logprobs = answer(url, model, max_tokens=1)["choices"][0]["logprobs"]
    return sorted(logprobs["top_logprobs"][0].values())


def test_adapters_compute_what_they_do_in_the_built_in_engine(
    adapted: RunningStack, files: Files
) -> None:
    body = {"lora_name": "law", "lora_path": "law"}
    assert fetch(f"{adapted.url}/v1/load_lora_adapter", body).status == 200
    names = {each["id"] for each in call(f"{adapted.url}/v1/models")["data"]}
    assert names == {"tiny", "sql", "law"}
    got = {name: first_token(adapted.url, name) for name in names}
    with RunningStack(
        *flags(files), "--lora-modules", f"law={files.adapters / 'law'}", "--dtype", "float32",
        "--data-parallel-size", "1", "--api-server-count", "1", "--max-model-len", "512",
        timeout=400,
    ) as built_in:  # fmt: skip
        for name in names:
            assert got[name] == pytest.approx(first_token(built_in.url, name), abs=2e-3), name
    assert got["tiny"] != pytest.approx(got["sql"], abs=2e-2)
    assert got["law"] != pytest.approx(got["sql"], abs=2e-2)


def test_adapter_that_vllm_cannot_load_is_refused_with_its_reason(adapted: RunningStack) -> None:
    body = {"lora_name": "bad", "lora_path": "untargeted"}
    refused = fetch(f"{adapted.url}/v1/load_lora_adapter", body)
    assert refused.status == 400
    assert "target_modules" in refused.error["message"]
    body = {"lora_name": "bad", "lora_path": "../model"}
    assert "outside" in fetch(f"{adapted.url}/v1/load_lora_adapter", body).error["message"]
    assert ready_ranks(adapted.url) == {0, 1}


def test_unloaded_adapter_leaves_the_engines(adapted: RunningStack) -> None:
    for name in ("law", "gone"):  # equal adapters are loaded once
        body = {"lora_name": name, "lora_path": "law"}
        fetch(f"{adapted.url}/v1/load_lora_adapter", body)
    for name in ("law", "gone"):
        assert fetch(f"{adapted.url}/v1/unload_lora_adapter", {"lora_name": name}).status == 200
    answered = fetch(f"{adapted.url}/v1/completions", {"model": "gone", "prompt": "x"})
    assert answered.status == 404


def test_streams_with_adapters_survive_the_death_of_an_engine(adapted: RunningStack) -> None:
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = answer(
            adapted.url, ("tiny", "sql")[number % 2], max_tokens=300, ignore_eos=True
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    victim = adapted.processes()["engine 1"]
    for each in threads:
        each.start()
    until(lambda: _running(adapted.url), "requests run")
    victim.send_signal(signal.SIGKILL)
    for each in threads:
        each.join(300)
    assert [found[number]["usage"]["completion_tokens"] for number in range(8)] == [300] * 8
    until(lambda: ready_ranks(adapted.url) == {0, 1}, "it is back", within=START_WITHIN)
    for rank in (0, 1):
        loaded = call(f"{adapted.url}/collective_rpc", {"method": "loaded-adapters", "rank": rank})
        assert loaded["results"] == [1], "the adapter of the settings, not the unloaded ones"


def _running(url: str) -> bool:
    text = fetch(f"{url}/metrics").text
    lines = [each for each in text.splitlines() if "num_requests_running{" in each]
    return bool(lines) and all(float(each.rsplit(" ", 1)[1]) > 0 for each in lines)


def test_response_format_applies_after_reasoning(adapted: RunningStack) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "who"}], "max_tokens": 200,
        "temperature": 0, "thinking_token_budget": 20,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA},
        },
    }  # fmt: skip
    message = call(f"{adapted.url}/v1/chat/completions", body)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert set(json.loads(message["content"])) == {"name", "old"}
    del body["response_format"]  # then the budget is in a grammar of any tokens
    message = call(f"{adapted.url}/v1/chat/completions", body)["choices"][0]["message"]
    assert message["content"]


def test_required_tool_call_is_generated(adapted: RunningStack) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "who"}], "max_tokens": 200,
        "temperature": 0, "tools": [tool], "tool_choice": "required", "thinking_token_budget": 5,
    }  # fmt: skip
    [called] = call(f"{adapted.url}/v1/chat/completions", body)["choices"][0]["message"][
        "tool_calls"
    ]
    assert called["function"]["name"] == "look_up"
    assert set(json.loads(called["function"]["arguments"])) == {"name", "old"}


def test_profiles_are_written_by_vllm(adapted: RunningStack, files: Files) -> None:
    call(f"{adapted.url}/start_profile", {})
    answer(adapted.url, "tiny", max_tokens=3)
    call(f"{adapted.url}/stop_profile", {}, timeout=120)
    assert list(files.traces.iterdir())
