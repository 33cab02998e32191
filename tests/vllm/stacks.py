"""What the tests of vLLM's engines share."""

import json
from pathlib import Path
from typing import Any

import httpx
import tokenizers

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME
from tests.support.http import ADMIN_KEY

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
GRAMMARS = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
"""Else the model, which knows no JSON, goes on with newlines."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def vllm_stack() -> RunningStack:
    """Return a stack of two engines, not yet started."""
    return RunningStack(
        "--engine-backend", "vllm", "--engine-python", str(PYTHON), "--data-parallel-size", "2",
        "--min-ready-engines", "2", "--api-server-count", "1", "--enforce-eager",
        "--max-model-len", "512", "--dtype", "float32", "--engine-args", json.dumps(GRAMMARS),
        "--admin-key", ADMIN_KEY,
        timeout=800,
        environment=ENVIRONMENT,
    )  # fmt: skip


def prompts(count: int) -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    beginnings = ["ROMEO:\nWhat", "First Citizen:\nWe", "KING:\nMy lord", "To be", "Enter the"]
    return [tokenizer.encode(f"{beginnings[i % 5]} {'and ' * (i // 5)}").ids for i in range(count)]


def complete(url: str, prompt: list[int], **fields: Any) -> Any:
    body = {"model": BUNDLED_MODEL_NAME, "prompt": prompt, "temperature": 0, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    return response.json() if response.is_success else response
