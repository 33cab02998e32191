"""What the tests of vLLM's engines share."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tokenizers

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME
from tests.support.http import ADMIN_KEY, fetch
from tests.support.ports import free_ports
from tests.support.process_logs import ProcessLog
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
SETTINGS = (
    "--max-model-len", "512", "--dtype", "float32", "--enforce-eager", "--scheduling-policy",
    "priority",
)  # fmt: skip
GRAMMARS = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
"""Else the model, which knows no JSON, goes on with newlines."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
START_WITHIN = 600.0
"""Seconds for vLLM's start on a busy machine, most of which are its imports."""


def vllm_stack(
    *flags: str,
    engine_args: dict[str, Any] = GRAMMARS,
    environment: dict[str, str] | None = None,
) -> RunningStack:
    """Return a stack of two engines, not yet started."""
    return RunningStack(
        *flags, "--engine-backend", "vllm", "--engine-python", str(PYTHON),
        "--data-parallel-size", "2", "--min-ready-engines", "2", "--api-server-count", "1",
        *SETTINGS, "--engine-args", json.dumps(engine_args), "--admin-key", ADMIN_KEY,
        timeout=START_WITHIN,
        # No process beside each engine's own, whose imports take as long again.
        environment={**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                     **(environment or {})},
    )  # fmt: skip


@contextmanager
def plain_vllm(model: Path = BUNDLED_MODEL, name: str = BUNDLED_MODEL_NAME) -> Iterator[str]:
    """Run `vllm serve` with the settings of `vllm_stack`; its URL.

    By its module: the command asks for the version of a package vllm, which is vllm-cpu here.
    """
    (port,) = free_ports(1)
    command = [
        *(str(PYTHON), "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), *SETTINGS),
    ]  # fmt: skip
    command += [f"--{name.replace('_', '-')}={json.dumps(of)}" for name, of in GRAMMARS.items()]
    log = ProcessLog("vllm serve")
    process = log.process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log.descriptor, stderr=subprocess.STDOUT,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, "vllm serve has ended"
        return fetch(f"{url}/health").status == 200

    try:
        until(is_ready, "vllm serve is ready", within=START_WITHIN)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def prompts(count: int) -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    beginnings = ["ROMEO:\nWhat", "First Citizen:\nWe", "KING:\nMy lord", "To be", "Enter the"]
    return [tokenizer.encode(f"{beginnings[i % 5]} {'and ' * (i // 5)}").ids for i in range(count)]


def complete(url: str, prompt: list[int], **fields: Any) -> Any:
    body = {"model": BUNDLED_MODEL_NAME, "prompt": prompt, "temperature": 0, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    return response.json() if response.is_success else response
