"""vLLM's own KV connectors run inside its engines, with both of their halves."""

import json
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.vllm.stacks import ENVIRONMENT, PYTHON, SETTINGS, START_WITHIN, complete, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.stack]


def test_prompt_is_read_from_vllm_connector_storage(tmp_path: Path) -> None:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with RunningStack(
        "--engine-backend", "vllm", "--engine-python", str(PYTHON), "--data-parallel-size", "1",
        "--api-server-count", "1", *SETTINGS, "--no-enable-prefix-caching",
        "--engine-args", json.dumps({"kv_transfer_config": connector}),
        timeout=START_WITHIN, environment={**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ) as stack:  # fmt: skip
        prompt = prompts(1)[0] * 40  # more than a block, which has 128 tokens
        computed, read = (complete(stack.url, prompt, max_tokens=20) for _ in range(2))
    assert list(tmp_path.rglob("*.safetensors"))
    assert read["choices"][0]["text"] == computed["choices"][0]["text"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (computed, read)]
    assert cached[0] == 0
    assert cached[1] > 0
