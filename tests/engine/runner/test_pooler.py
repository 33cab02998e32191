"""Pooling decoders: last-token vectors, for any division of the prompt into steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.shared.messages import RequestOutput
from tests.engine.pooling import (
    outputs_of,
    pooling_request,
    prompts,
    save_pooling_model,
    vector,
    vectors_of,
)
from tests.engine.serving import request

PROMPTS = prompts(12)


def test_the_last_state_is_the_embedding_in_chunks_and_with_cached_prefixes(tmp_path: Path) -> None:
    reference = save_pooling_model("Qwen3", tmp_path)
    shared = [[9] * 40 + each for each in PROMPTS]
    requests = [pooling_request(i + 1, ids) for i, ids in enumerate(shared)]
    for scheduling in ({"max_num_batched_tokens": 24}, {"async_scheduling": True}):
        found = outputs_of(tmp_path, requests, **scheduling)
        assert any(output.num_cached_tokens for output in found.values())
        for index, token_ids in enumerate(shared):
            with torch.inference_mode():
                state = reference(torch.tensor([token_ids])).last_hidden_state[0, -1]
            wanted = torch.nn.functional.normalize(state, dim=0).numpy()
            np.testing.assert_allclose(vector(found[index + 1]), wanted, atol=1e-4)


def test_mean_pooling_of_decoder_is_computed_in_one_step(tmp_path: Path) -> None:
    reference = save_pooling_model("Qwen3", tmp_path)
    mean = {"pooler_config": '{"pooling_type": "MEAN", "normalize": false}'}
    found = vectors_of(tmp_path, PROMPTS, model=mean, max_num_batched_tokens=24)
    for token_ids, each in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([token_ids])).last_hidden_state[0]
        np.testing.assert_allclose(each, states.mean(0).numpy(), atol=1e-4)


def test_a_decoder_classifies_by_its_last_token(tmp_path: Path) -> None:
    reference = save_pooling_model("Qwen3", tmp_path, "ForSequenceClassification", num_labels=3)
    found = vectors_of(tmp_path, PROMPTS, max_num_batched_tokens=24)
    for token_ids, scores in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([token_ids])).logits[0]
        np.testing.assert_allclose(scores, logits.softmax(0).numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_sharded_decoder_gives_same_vectors(kind: str, tmp_path: Path) -> None:
    save_pooling_model("Qwen3", tmp_path, kind)
    whole = vectors_of(tmp_path, PROMPTS, max_num_batched_tokens=24)
    cut = vectors_of(tmp_path, PROMPTS, max_num_batched_tokens=24, processes=2)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_model_that_makes_vectors_generates_nothing(tmp_path: Path) -> None:
    save_pooling_model("Qwen3", tmp_path)
    found = outputs_of(tmp_path, [request(1, [5, 6, 7]), pooling_request(2, [5, 6, 7])])
    assert found[1].error == "this engine's model generates nothing"
    assert found[2].finish_reason == "stop"


ALL = {"pooler_config": '{"tok_pooling_type": "ALL"}'}


def rows(output: RequestOutput, size: int) -> Any:
    return vector(output).reshape(-1, size)


def test_decoder_returns_token_vectors_if_requested(tmp_path: Path) -> None:
    reference = save_pooling_model("Qwen3", tmp_path)
    requests = [pooling_request(i + 1, ids, per_token=True) for i, ids in enumerate(PROMPTS)]
    others = [pooling_request(i + 101, ids) for i, ids in enumerate(PROMPTS)]
    mixed = [each for pair in zip(requests, others, strict=True) for each in pair]
    found = outputs_of(tmp_path, mixed, model=ALL, max_num_batched_tokens=24)
    for index, token_ids in enumerate(PROMPTS):
        with torch.inference_mode():
            states = reference(torch.tensor([token_ids])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states, dim=1).numpy()
        np.testing.assert_allclose(rows(found[index + 1], 64), wanted, atol=1e-4)
        np.testing.assert_allclose(vector(found[index + 101]), wanted[-1], atol=1e-4)


def test_tokens_of_prompts_that_are_computed_in_parts_have_no_vectors(tmp_path: Path) -> None:
    save_pooling_model("Qwen3", tmp_path)
    found = outputs_of(
        tmp_path, [pooling_request(1, [5, 6], per_token=True), pooling_request(2, [5, 6])]
    )
    assert found[1].error == "this engine computes prompts in parts: tokens have no vectors"
    assert found[2].finish_reason == "stop"


def test_each_token_is_classified(tmp_path: Path) -> None:
    reference = save_pooling_model("Qwen3", tmp_path, "ForSequenceClassification", num_labels=3)
    requests = [
        pooling_request(i + 1, ids, per_token=True, activate=bool(i % 2))
        for i, ids in enumerate(PROMPTS)
    ]
    settings = ALL["pooler_config"][:-1] + ', "logit_mean": 0.5, "logit_sigma": 2.0}'
    found = outputs_of(tmp_path, requests, model={"pooler_config": settings})
    for index, token_ids in enumerate(PROMPTS):
        with torch.inference_mode():
            states = reference.model(torch.tensor([token_ids])).last_hidden_state[0]
            outputs = (reference.score(states) - 0.5) / 2.0
        wanted = outputs.softmax(1) if index % 2 else outputs
        np.testing.assert_allclose(rows(found[index + 1], 3), wanted.numpy(), atol=1e-4)


def test_only_final_tokens_of_a_step_have_vectors(tmp_path: Path) -> None:
    save_pooling_model("Qwen3", tmp_path)
    prompt = [9, 7, 8, 7, 5]
    requests = [
        pooling_request(1, prompt, per_token=True), pooling_request(2, [8, 9], per_token=True)
    ]  # fmt: skip
    of_all = outputs_of(tmp_path, requests, model=ALL)
    steps = {"pooler_config": '{"pooling_type": "STEP", "step_tag_id": 7}'}
    found = outputs_of(tmp_path, requests, model=steps)
    assert rows(found[1], 64).tolist() == rows(of_all[1], 64)[[1, 3]].tolist()
    assert found[2].pooled == b""
