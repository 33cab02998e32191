"""An engine on a CUDA device generates the same tokens as on a CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.models.attention.cuda import CudaAttention, KernelAttention
from engine.shared.config import (
    BUNDLED_MODEL,
)
from tests.engine.comparing import relative
from tests.engine.configs import config_of
from tests.engine.draft_heads import save_eagle3
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.pooling import ENCODERS, prompts, save_pooling_model, vectors_of
from tests.engine.serving import PARAMETERS, SOME_TEXT, request, serve

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REQUESTS = [
    request(id, [(7 * id + 3 * i) % 250 for i in range(3 + 20 * id)], temperature=0.0)
    for id in range(5)
]
SCHEDULING = [{}, {"async_scheduling": True}, {"speculative_ngram": 4}]


@pytest.mark.parametrize("scheduling", SCHEDULING, ids=["apart", "overlapped", "drafted"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "qwen3-moe"])
def test_tokens_equal_those_of_a_cpu(
    name: str, scheduling: dict[str, Any], checkpoint: SaveModel
) -> None:
    directory = checkpoint(name).directory
    there, _ = serve(directory, REQUESTS, dtype="float32", device="cuda", **scheduling)
    here, _ = serve(directory, REQUESTS, dtype="float32", **scheduling)
    assert [answer.tokens for answer in there] == [answer.tokens for answer in here]


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_the_bundled_model_agrees_in_16_bits(block_size: int, eager: bool) -> None:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "block_size": block_size,
        "enforce_eager": eager,
    }
    there, _ = serve(BUNDLED_MODEL, REQUESTS, device="cuda", **options)
    here, _ = serve(BUNDLED_MODEL, REQUESTS, **options)
    agreeing = [
        sum(a == b for a, b in zip(one.tokens[:8], other.tokens[:8], strict=True))
        for one, other in zip(there, here, strict=True)
    ]
    assert sum(agreeing) >= 0.8 * 8 * len(REQUESTS)


@pytest.mark.real_device
def test_graph_replay_equals_eager_execution(checkpoint: SaveModel) -> None:
    directory = checkpoint("llama").directory
    answers = [
        serve(
            directory, REQUESTS, dtype="bfloat16", device="cuda", block_size=256,
            enforce_eager=eager, batch_invariant=True,
        )[0]
        for eager in (True, False)
    ]  # fmt: skip
    assert [each.tokens for each in answers[0]] == [each.tokens for each in answers[1]]


def test_the_cache_is_sized_by_a_trial_step(checkpoint: SaveModel) -> None:
    def blocks(utilization: float) -> int:
        executor = InProcessExecutor(
            config_of(
                checkpoint("llama").directory,
                model={"device": "cuda", "dtype": "auto"},
                cache={
                    "gpu_memory_utilization": utilization,
                    "block_size": 256,
                    "num_kv_blocks": None,
                },
                scheduler={"max_num_seqs": 4096},
            )
        )
        found = executor.info.num_kv_blocks
        executor.shutdown()
        return found

    assert 0 < blocks(0.3) <= blocks(0.6)


@pytest.mark.real_device
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_kernel_attends_and_steps_are_recorded(block_size: int, checkpoint: SaveModel) -> None:
    executor = InProcessExecutor(
        config_of(
            checkpoint("llama").directory,
            model={"device": "cuda", "dtype": "bfloat16"},
            cache={"num_kv_blocks": 100, "block_size": block_size},
        )
    )
    attention = executor._loaded.model.attention
    assert isinstance(attention, CudaAttention)
    assert isinstance(attention.for_blocks(block_size), KernelAttention)
    assert executor._runner is not None
    assert executor._runner._graphs is not None
    executor.shutdown()


@pytest.mark.parametrize("scheduling", SCHEDULING, ids=["apart", "overlapped", "drafted"])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_batch_invariant_answers_equal_those_of_single_requests(
    name: str, scheduling: dict[str, Any], checkpoint: SaveModel
) -> None:
    """With graphs, drafts and chunks, also if a stream continues as a prompt on another engine."""
    directory = checkpoint(name).directory
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "batch_invariant": True}
    together, _ = serve(directory, REQUESTS, **options, **scheduling)
    for asked, answer in zip(REQUESTS, together, strict=True):
        [alone], _ = serve(directory, [asked], **options)
        assert alone.tokens == answer.tokens
        moved = request(asked.id, [*asked.prompt_token_ids, *answer.tokens[:5]], temperature=0.0)
        [continued], _ = serve(directory, [moved], **options)
        shared = len(answer.tokens) - 5
        assert continued.tokens[:shared] == answer.tokens[5:]


ALL_KINDS = [
    request(id, SOME_TEXT[: 11 + 2 * id] * (1 + id % 3), max_tokens=30, **sampling)
    for id, sampling in enumerate(PARAMETERS.values())
]


def test_every_kind_of_sampling_equals_cpu() -> None:
    there, _ = serve(BUNDLED_MODEL, ALL_KINDS, dtype="float32", device="cuda")
    here, _ = serve(BUNDLED_MODEL, ALL_KINDS, dtype="float32")
    for name, one, other in zip(PARAMETERS, there, here, strict=True):
        assert one.tokens == other.tokens, name
        assert one.reason == other.reason, name
        scores = [[each.logprob for each in answer.logprobs] for answer in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3), name


@pytest.mark.parametrize("kind", ["draft model", "draft head"])
def test_drafts_change_no_token(kind: str, checkpoint: SaveModel, tmp_path: Path) -> None:
    target = checkpoint("llama-deep")
    drafting = str(target.directory)
    if kind == "draft head":
        save_eagle3(target, tmp_path, layer_ids=[1, 2, 3])
        drafting = str(tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda"}
    plain, _ = serve(target.directory, REQUESTS, **options)
    drafted, stats = serve(target.directory, REQUESTS, speculative_model=drafting, **options)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    counters = stats.counters
    assert counters.spec_draft_tokens > 0
    if kind == "draft model":
        assert counters.spec_accepted_tokens > 0.9 * counters.spec_draft_tokens


def test_model_computes_the_same_after_sleep(checkpoint: SaveModel) -> None:
    kind = {"device": "cuda", "dtype": "bfloat16"}
    config = config_of(checkpoint("qwen3").directory, model=kind, cache={"block_size": 16})
    executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)

    def answer(number: int) -> list[int]:
        core.handle(request(number, [5, 6, 7, 8], temperature=0.0))
        tokens: list[int] = []
        while core.has_work:
            for output in core.step().outputs.get(0, []):
                tokens += output.token_ids
        return tokens

    first = answer(1)
    for level in (1, 2):
        executor.sleep(level)
        executor.wake_up()
        assert answer(1 + level) == first
    executor.shutdown()


@pytest.mark.parametrize("family", [*ENCODERS, "Qwen3"])
def test_vectors_equal_those_of_a_cpu(family: str, tmp_path: Path) -> None:
    save_pooling_model(family, tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    settings = {"runner": "pooling", "dtype": "float32"}
    there = vectors_of(tmp_path, prompts(12), model={"device": "cuda", **settings})
    here = vectors_of(tmp_path, prompts(12), model=settings)
    for one, other in zip(there, here, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_adapters_have_same_effect_as_on_cpu(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="needs peft beside the device", exc_type=ImportError)
    from tests.engine.lora.adapters import train
    from tests.engine.lora.test_adapted_models import load

    model = checkpoint(name)
    adapter = train(model, tmp_path, 1).directory
    found = []
    for device in ("cpu", "cuda"):
        engine = load(
            driver, model.directory, adapter, dtype="float32", device=torch.device(device)
        )
        for slot, used in enumerate((-1, 0, 0)):
            engine.start(slot, prompt(20 + slot), adapter=used)
        logits = [engine.logits({0: 20, 1: 21, 2: 21}), engine.logits({2: 1})]
        found.append(torch.cat(logits).cpu())
    assert relative(found[1], found[0]) < 1e-4
