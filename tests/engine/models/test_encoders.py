"""Encoders in one flat batch agree with transformers, sequence by sequence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.formats.files import CheckpointError
from engine.models.spec import UnsupportedModel
from tests.engine.pooling import (
    ENCODERS,
    outputs_of,
    pooling_request,
    prompts,
    save_pooling_model,
    vector,
    vectors_of,
)

PROMPTS = prompts(24)


@torch.inference_mode()
def _states(reference: Any, token_ids: list[int]) -> torch.Tensor:
    states: torch.Tensor = reference(torch.tensor([token_ids])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("family", ENCODERS)
def test_embeddings_agree_with_transformers(family: str, tmp_path: Path) -> None:
    reference = save_pooling_model(family, tmp_path)
    means = vectors_of(tmp_path, PROMPTS, model={"pooler_config": '{"pooling_type": "MEAN"}'})
    firsts = vectors_of(tmp_path, PROMPTS)
    for token_ids, mean, first in zip(PROMPTS, means, firsts, strict=True):
        states = _states(reference, token_ids)
        for found, wanted in ((mean, states.mean(0)), (first, states[0])):
            expected = torch.nn.functional.normalize(wanted, dim=0).numpy()
            np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_agree_with_transformers(family: str, labels: int, tmp_path: Path) -> None:
    reference = save_pooling_model(family, tmp_path, "ForSequenceClassification", num_labels=labels)
    found = vectors_of(tmp_path, PROMPTS)
    for token_ids, scores in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([token_ids])).logits[0]
        wanted = logits.sigmoid() if labels == 1 else logits.softmax(0)
        np.testing.assert_allclose(scores, wanted.numpy(), atol=1e-5)


def test_a_pair_has_two_types(tmp_path: Path) -> None:
    reference = save_pooling_model("Bert", tmp_path, "ForSequenceClassification", num_labels=1)
    token_ids, second = PROMPTS[0] + PROMPTS[1], len(PROMPTS[0])
    types = [int(index >= second) for index in range(len(token_ids))]
    found = outputs_of(
        tmp_path,
        [
            pooling_request(1, token_ids, types_from=second, activate=False),
            pooling_request(2, token_ids, activate=False),
        ],
    )
    for id, row in ((1, types), (2, [0] * len(types))):
        with torch.inference_mode():
            wanted = reference(torch.tensor([token_ids]), token_type_ids=torch.tensor([row]))
        np.testing.assert_allclose(vector(found[id]), wanted.logits[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_each_token_has_a_vector_if_requested(family: str, tmp_path: Path) -> None:
    reference = save_pooling_model(family, tmp_path)
    asked = [
        pooling_request(i + 1, ids, per_token=bool(i % 3), dimensions=9 * (i % 2))
        for i, ids in enumerate(PROMPTS)
    ]
    found = outputs_of(tmp_path, asked)
    for index, token_ids in enumerate(PROMPTS):
        size = 9 if index % 2 else 64
        with torch.inference_mode():
            states = reference(torch.tensor([token_ids])).last_hidden_state[0, :, :size]
        states = states if index % 3 else states[:1]
        wanted = torch.nn.functional.normalize(states, dim=1).numpy()
        np.testing.assert_allclose(vector(found[index + 1]).reshape(-1, size), wanted, atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_batch_invariant_vector_has_same_bits_alone(family: str, tmp_path: Path) -> None:
    save_pooling_model(family, tmp_path)
    together = vectors_of(tmp_path, PROMPTS, batch_invariant=True)
    for token_ids, found in list(zip(PROMPTS, together, strict=True))[:6]:
        (alone,) = vectors_of(tmp_path, [token_ids], batch_invariant=True)
        assert alone.tobytes() == found.tobytes()


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_bfloat16_is_near_float32(family: str, tmp_path: Path) -> None:
    save_pooling_model(family, tmp_path)
    exact = vectors_of(tmp_path, PROMPTS)
    for settings in ({"dtype": "bfloat16"},):
        near = vectors_of(tmp_path, PROMPTS, model=settings)
        assert all(float(a @ b) > 0.97 for a, b in zip(exact, near, strict=True))


def test_embeddings_are_truncated_before_normalization(tmp_path: Path) -> None:
    save_pooling_model("Bert", tmp_path)
    found = outputs_of(
        tmp_path,
        [
            pooling_request(1, PROMPTS[0], activate=False),
            pooling_request(2, PROMPTS[0], dimensions=16),
        ],
    )
    cut = vector(found[1])[:16]
    np.testing.assert_allclose(vector(found[2]), cut / np.linalg.norm(cut), atol=1e-6)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_pooling_model("Bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 95}))
    with pytest.raises(CheckpointError, match=r"intermediate.dense.weight has shape \[96, 64\]"):
        vectors_of(tmp_path, PROMPTS[:1])
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"unexpected encoder.layer.3"):
        vectors_of(tmp_path, PROMPTS[:1])
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertSomething"]}))
    with pytest.raises(UnsupportedModel, match="BertSomething is not supported"):
        vectors_of(tmp_path, PROMPTS[:1])


def test_roberta_positions_start_after_padding(tmp_path: Path) -> None:
    save_pooling_model("Roberta", tmp_path)
    (whole,) = vectors_of(tmp_path, [[7] * 256], max_num_batched_tokens=16)
    assert np.isfinite(whole).all()
    found = outputs_of(tmp_path, [pooling_request(1, [7] * 257)])
    assert found[1].error == "the input has 257 tokens, but this engine takes 256"
    with pytest.raises(UnsupportedModel, match="--max-model-len 257 is more than the 256"):
        vectors_of(tmp_path, PROMPTS[:1], model={"max_model_len": 257})
