"""A checkpoint's multi-token prediction layer drafts tokens and changes no output."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.executor.rules import BadDraftModel
from engine.models.formats.files import CheckpointError
from engine.models.spec import UnsupportedModel
from engine.shared.config import (
    EngineConfig,
)
from engine.shared.messages import AddRequest
from tests.engine.configs import config_of
from tests.engine.draft_heads import (
    MtpReference,
    Proposals,
    greedy_requests,
    note_proposals,
    save_mtp,
)
from tests.engine.fixtures import SaveModel
from tests.engine.serving import (
    SOME_TEXT,
    assert_alike,
    every_kind,
    request,
    serve,
)

BIAS = {70: 8.0, 71: 8.0}

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek3", {"normed": False}),
    ("deepseek3-halves", {"normed": False, "own_head": False}),
    ("glm4-moe-normed", {"normed": True}),
    ("glm4-moe", {"normed": True, "own_head": False, "copies": False}),
]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return note_proposals(monkeypatch)


@pytest.fixture(scope="module", params=FORMS, ids=[f"{name}-{form}" for name, form in FORMS])
def mtp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpReference:
    name, form = request.param
    return save_mtp(name, tmp_path_factory.mktemp(name), **form)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> MtpReference:
    return save_mtp("glm4-moe-normed", tmp_path_factory.mktemp("glm"), normed=True)


@pytest.mark.parametrize("mtp", [FORMS[0], FORMS[3]], indirect=True, ids=["latent", "heads"])
def test_proposals_equal_formula_for_chunks_prefixes_and_batches(
    mtp: MtpReference, proposals: Proposals
) -> None:
    requests = [
        AddRequest(id, str(id), 0, 0, each.prompt_token_ids, each.sampling)
        for id, each in enumerate(greedy_requests(BIAS) * 2)
    ]
    plain, _ = serve(mtp.directory, requests, dtype="float32")
    drafted, stats = serve(
        mtp.directory, requests, dtype="float32", num_blocks=36, max_slowdown=0,
        speculative_method="mtp",
    )  # fmt: skip
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    proposals.check(mtp, BIAS)
    counters = stats.counters
    assert counters.prefix_cache_hits > 0
    assert counters.preemptions > 0
    assert 0 < counters.spec_accepted_tokens < counters.spec_draft_tokens


def test_mtp_logits_equal_formula(mtp: MtpReference, proposals: Proposals) -> None:
    requests = [request(1, SOME_TEXT, temperature=0.0)]
    serve(
        mtp.directory, requests, dtype="float32", speculative_method="mtp", num_speculative_tokens=1
    )
    assert len(proposals.logits) == len(proposals.made) > 30
    for (after, _), logits in zip(proposals.made, proposals.logits, strict=True):
        assert (logits[0] - mtp.drafts(after, 1)[1]).abs().max() < 1e-3


def test_drafting_changes_no_token_with_any_sampling(glm: MtpReference) -> None:
    plain, _ = serve(glm.directory, every_kind(), dtype="float32")
    drafted, stats = serve(
        glm.directory, every_kind(), dtype="float32", num_blocks=40, max_slowdown=0,
        speculative_method="mtp",
    )  # fmt: skip
    assert_alike(plain, drafted)
    assert stats.counters.preemptions > 0
    assert stats.counters.spec_draft_tokens > 0


def settings(directory: Path, **model: Any) -> EngineConfig:
    drafting = {"speculative_method": "mtp", "speculative_row_price": 0}
    return config_of(directory, model=model, scheduler=drafting)


def test_mtp_layer_is_quantized_with_the_model(glm: MtpReference) -> None:
    config = settings(glm.directory, quantization="int8")
    executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    core.handle(request(1, SOME_TEXT, temperature=0.0, max_tokens=20))
    while core.has_work:
        core.step()
    assert core.stats().counters.spec_draft_tokens > 0
    executor.shutdown()


def test_a_checkpoint_without_such_a_layer_is_refused(
    checkpoint: SaveModel, tmp_path: Path
) -> None:
    for name in ("llama", "deepseek2"):
        with pytest.raises(UnsupportedModel, match=r"--speculative-method mtp: .* has no layer"):
            InProcessExecutor(settings(checkpoint(name).directory))
    made = save_mtp("glm4-moe", tmp_path, normed=True)
    config = tmp_path / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers"):
        InProcessExecutor(settings(made.directory))


def test_tensors_of_the_layer_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_mtp("glm4-moe", tmp_path, normed=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.enorm.weight"]
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, path)
    wrong = r"missing model.layers.2.enorm.weight; model.layers.2.eh_proj.weight has shape"
    with pytest.raises(CheckpointError, match=wrong):
        InProcessExecutor(settings(tmp_path))


@pytest.mark.parametrize(
    ("model", "flag"),
    [({"load_format": "dummy"}, "--load-format"), ({"model_impl": "transformers"}, "--model-impl")],
    ids=str,
)
def test_incompatible_settings_are_named(
    glm: MtpReference, model: dict[str, Any], flag: str
) -> None:
    with pytest.raises(BadDraftModel, match=f"--speculative-method mtp .*{flag}"):
        InProcessExecutor(settings(glm.directory, **model))
