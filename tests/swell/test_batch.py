"""`swell run-batch` with an engine in its own process."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.shared.config import CacheConfig, ExecutorConfig, ModelConfig, ParallelConfig
from server.batch.config import BatchConfig, RunBatchConfig
from server.fleet.own_server import OwnServer, ServerFailed
from swell.batch import run_batch

ONE = ParallelConfig(data_parallel_size=1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a batch, which may start no server."""

    def refuse(_: OwnServer) -> None:
        raise ServerFailed("a server was started")

    monkeypatch.setattr(OwnServer, "__enter__", refuse)

    def run(count: int, options: dict[str, Any], **batch: Any) -> tuple[int, list[Any]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        lines = [
            {"custom_id": str(each), "url": "/v1/completions", "body": _body(each)}
            for each in range(count)
        ]
        source.write_text("".join(json.dumps(each) + "\n" for each in lines))
        files = BatchConfig(input_file=str(source), output_file=str(target), **batch)
        settings: dict[str, Any] = {
            "executor": ExecutorConfig(executor="simulated"),
            "parallel": ONE,
            **options,
        }
        code = run_batch(RunBatchConfig(batch=files, **settings))
        return code, [json.loads(each) for each in target.read_text().splitlines()]

    return run


def _body(number: int) -> dict[str, Any]:
    if number == 3:
        return {"prompt": "a", "max_tokens": -1}
    return {"prompt": f"To be {number}", "max_tokens": 5, "ignore_eos": True}


def test_one_engine_answers_without_a_server(run: Any) -> None:
    code, found = run(20, {})
    assert code == 0
    assert [each["custom_id"] for each in found] == [str(each) for each in range(20)]
    statuses = [each["response"]["status_code"] for each in found]
    assert statuses == [400 if each == 3 else 200 for each in range(20)]
    assert all(each["response"]["request_id"] == each["id"] for each in found)
    tokens = [each["response"]["body"]["usage"]["completion_tokens"] for each in found[4:]]
    assert set(tokens) == {5}


def test_a_request_that_takes_too_long_is_given_up(run: Any) -> None:
    slow = ExecutorConfig(executor="simulated", simulated_step_us=500_000)
    code, found = run(1, {"executor": slow}, request_timeout=0.05)
    assert code == 1
    assert found[0]["error"]["code"] == "request_timeout"


def test_a_model_that_cannot_be_loaded_is_told(run: Any, capsys: Any, tmp_path: Path) -> None:
    code, found = run(1, {"model": ModelConfig(model=str(tmp_path))})
    assert (code, found) == (1, [])
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": ParallelConfig()},
        {"parallel": ParallelConfig(data_parallel_size=1, tensor_parallel_size=2)},
        {"cache": CacheConfig(kv_memory_tier_bytes=1 << 20)},
    ],
)
def test_what_needs_a_server_gets_one(run: Any, capsys: Any, options: dict[str, Any]) -> None:
    assert run(1, options)[0] == 1
    assert "a server was started" in capsys.readouterr().err
