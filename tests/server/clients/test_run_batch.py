"""`swell run-batch` against a server in this process, and once with one of its own."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from engine.shared.config import ModelConfig, ParallelConfig, SchedulerConfig
from server.clients.batch import run_batch
from server.clients.batch_config import BatchConfig, RunBatchConfig
from server.clients.batch_lines import OutputBusy, OutputFile
from server.fleet.local_server import serve_arguments
from server.router.generation_client import NoEngineAvailable

pytestmark = pytest.mark.slow

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {
        "model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]
    },
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "hello"}]]},
}  # fmt: skip


@pytest.fixture
def url(app: FastAPI, served: Callable[[FastAPI], AbstractContextManager[str]]) -> Iterator[str]:
    with served(app) as address:
        yield address


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    request = {
        "custom_id": name, "method": "POST", "url": url, "body": {**BODIES[url], **body},
    }  # fmt: skip
    return json.dumps(request)


def run(url: str, files: tuple[Path, Path], lines: list[str], **options: Any) -> int:
    source, target = files
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    batch = BatchConfig(input_file=str(source), output_file=str(target), url=url, **options)
    return run_batch(RunBatchConfig(batch=batch))


def results(files: tuple[Path, Path]) -> dict[str | None, dict[str, Any]]:
    found = [json.loads(each) for each in files[1].read_text(encoding="utf-8").splitlines()]
    by_name = {each["custom_id"]: each for each in found}
    assert len(by_name) == len(found)
    return by_name


def test_every_endpoint_is_supported(url: str, files: tuple[Path, Path]) -> None:
    assert run(url, files, [line(path, path) for path in BODIES]) == 0
    found = results(files)
    assert found.keys() == BODIES.keys()
    bodies = [found[path]["response"]["body"] for path in BODIES]
    assert [body.get("object", body.get("type")) for body in bodies] == [
        "text_completion", "chat.completion", "response", "message", "chat.completion",
    ]  # fmt: skip
    for each in found.values():
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["response"]["request_id"] == each["id"]


def test_second_run_skips_answered_requests(
    url: str, files: tuple[Path, Path], engines: Any
) -> None:
    lines = [line(str(number)) for number in range(20)]
    assert run(url, files, lines[:12], max_concurrency=3) == 0
    assert run(url, files, lines, max_concurrency=3) == 0
    assert len(engines.streams) == 20
    assert results(files).keys() == {str(number) for number in range(20)}
    assert run("http://localhost:1", files, lines) == 0, "nothing is left to ask a server for"


def test_answers_are_in_the_order_of_their_requests(
    url: str, files: tuple[Path, Path], engines: Any
) -> None:
    lines = [line(str(number)) for number in range(30)]
    lines[7] = "no request"
    assert run(url, files, lines[20:]) == 0
    answer, held = engines.script, []

    def last_first(stream: Any) -> Any:
        """Answer only after all requests have arrived, in reverse order."""
        held.append(stream)
        if len(held) == 19:
            for each in reversed(held[:-1]):
                each.feed(*answer(each))
            return answer(stream)
        return []

    engines.script = last_first
    assert run(url, files, lines) == 0
    found = [json.loads(each) for each in files[1].read_text(encoding="utf-8").splitlines()]
    names = [each["custom_id"] for each in found]
    assert names == [None if number == 7 else str(number) for number in range(30)]
    assert run(url, files, lines[29:]) == 0
    assert results(files).keys() == set(names) - {None}, "nothing that was answered is lost"


def test_run_resumes_after_a_crash(url: str, files: tuple[Path, Path], engines: Any) -> None:
    lines = [line(str(number)) for number in range(3)]
    assert run(url, files, lines) == 0
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[: len(whole) - 10])
    assert run(url, files, lines) == 0
    assert results(files).keys() == {"0", "1", "2"}
    assert len(engines.streams) == 4


def test_error_of_a_line_is_in_its_result(url: str, files: tuple[Path, Path]) -> None:
    lines = [line("good"), "not json", line("good"), line("bad", temperature=-1), ""]
    assert run(url, files, lines) == 0, "what is wrong with lines is said"
    found = [json.loads(each) for each in files[1].read_text(encoding="utf-8").splitlines()]
    assert [each["custom_id"] for each in found] == ["good", None, "good", "bad"]
    refused = next(each for each in found if each["custom_id"] == "bad")["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "temperature")
    errors = {each["error"]["code"]: each for each in found if each["error"] is not None}
    assert errors.keys() == {"invalid_json_line", "duplicate_custom_id"}
    assert errors["invalid_json_line"]["custom_id"] is None
    assert len(found) == 4


def test_busy_server_is_retried(url: str, files: tuple[Path, Path], engines: Any) -> None:
    answer, asked = engines.script, []

    def first_busy(stream: Any) -> Any:
        asked.append(stream)
        return [NoEngineAvailable()] if len(asked) == 1 else answer(stream)

    engines.script = first_busy
    assert run(url, files, [line("a")]) == 0
    assert len(asked) == 2


def test_failed_request_is_retried_by_next_run(
    url: str, files: tuple[Path, Path], engines: Any
) -> None:
    answer = engines.script
    engines.script = lambda stream: [NoEngineAvailable()]
    assert run(url, files, [line("a")], max_retries=0) == 1
    assert results(files)["a"]["response"]["status_code"] == 503
    engines.script = answer
    assert run(url, files, [line("a")]) == 0
    assert results(files)["a"]["response"]["status_code"] == 200


def test_without_a_server_nothing_is_written(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("http://127.0.0.1:1", files, [line("a")]) == 1
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert files[1].read_bytes() == b""


def test_two_runs_cannot_write_to_one_file(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out"), pytest.raises(OutputBusy), OutputFile(tmp_path / "out"):
        pass


def test_input_and_output_files_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_batch(RunBatchConfig()) == 2
    assert "input file" in capsys.readouterr().err


def test_own_server_gets_changed_settings() -> None:
    config = RunBatchConfig(
        batch=BatchConfig(input_file="in", api_key="k"),
        model=ModelConfig(model="org/model", served_model_name=("a", "b")),
        scheduler=SchedulerConfig(max_num_seqs=7),
        parallel=ParallelConfig(data_parallel_size=3),
    )
    assert serve_arguments(config) == [
        "org/model", "--served-model-name", "a", "b", "--max-num-seqs", "7",
        "--data-parallel-size", "3",
    ]  # fmt: skip
