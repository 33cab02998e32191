"""Engines serve prompts with images like transformers, whatever else they serve."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.executor.in_process import InProcessExecutor
from engine.executor.rules import image_refusal
from engine.executor.team import Team
from engine.models.hf_config import read_spec
from engine.shared.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AddRequest, EncoderInput, EngineCounters
from tests.engine.configs import config_of
from tests.engine.draft_heads import save_eagle3
from tests.engine.executor.many_kinds import serve as serve_steps
from tests.engine.fixtures import SaveModel
from tests.engine.images import encoder_input
from tests.engine.serving import Answer, request, serve
from tests.engine.tiny_models import IMAGE_TOKEN, Checkpoint

_END = 59
"""Text after each image, and between rows of one; Qwen always has text between images."""


def show(id: int, *parts: list[int] | int, name: str = "smolvlm", **sampling: Any) -> AddRequest:
    """Return a request with a prompt of tokens and of noise images with these seeds."""
    tokens: list[int] = []
    images: list[EncoderInput] = []
    for part in parts:
        if isinstance(part, int):
            images.append(picture(name, part, len(tokens)))
            count = images[-1].num_tokens
            breaks = range(4, count, 5) if name == "mistral3" else ()
            tokens += [_END if i in breaks else IMAGE_TOKEN for i in range(count)] + [_END]
        else:
            tokens += part
    message = request(id, tokens, **{"temperature": 0.0, "max_tokens": 12} | sampling)
    return replace(message, encoder_inputs=images)


def picture(name: str, number: int, position: int) -> EncoderInput:
    if name != "qwen2.5-vl":
        tokens = {"smolvlm": 4, "gemma3-vision": 16, "internvl": 16, "mistral3": 19}[name]
        return encoder_input(number, position, num_tokens=tokens)
    height, width = ((16, 16), (8, 48), (32, 8))[number % 3]
    tokens = height * width // 64
    return encoder_input(number, position, num_tokens=tokens, side=height, width=width)


def text(length: int, first: int = 60) -> list[int]:
    return [first + (7 * i) % 50 for i in range(length)]


def traffic(name: str = "smolvlm") -> list[AddRequest]:
    return [
        show(1, text(5), 1, text(9), name=name),
        show(2, text(30), name=name),
        show(3, text(5), 2, text(9), name=name),
        show(4, 3, 4, 3, text(60), 5, name=name),
        show(5, text(44), 1, text(2), name=name),
        show(6, text(5), 1, text(9), name=name),
        show(7, text(20), 6, 7, 8, 9, 10, 11, 12, text(4), name=name),
    ]


def check(model: Checkpoint, requests: list[AddRequest], answers: list[Answer]) -> None:
    """Check that each token is transformers' most likely one."""
    for each, answer in zip(requests, answers, strict=True):
        known = each.prompt_token_ids + answer.tokens[:-1]
        if each.encoder_inputs:
            logits = model.logits_with_images(known, each.encoder_inputs)
        else:
            logits = model.logits(known)
        expected = logits[len(each.prompt_token_ids) - 1 :].argmax(-1).tolist()
        assert answer.tokens == expected, each.request_id


ALL = pytest.mark.parametrize("name", ["smolvlm", "qwen2.5-vl", "gemma3-vision", "mistral3"])
_SMALL = {"tiers": {"encoder_cache_bytes": 1}, "max_num_encoder_tokens": 4}
_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True, **_SMALL},
    "drafting": {"speculative_ngram": 3},
    "short of blocks": {"num_blocks": 33, "enable_prefix_caching": False, **_SMALL},
    "batch-invariant": {"batch_invariant": True},
}
"""Of engines."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("smolvlm", "plain"),
        ("smolvlm", "short of blocks"),
        ("qwen2.5-vl", "overlapped"),
        ("qwen2.5-vl", "batch-invariant"),
        ("gemma3-vision", "overlapped"),
        ("gemma3-vision", "drafting"),
        # A device has one cache group, in which 28 blocks do not hold a sequence.
        pytest.param("gemma3-vision", "short of blocks", marks=pytest.mark.processor),
    ],
)
def test_prompts_with_images_and_without_are_served_together(
    name: str, kind: str, checkpoint: SaveModel
) -> None:
    model, requests, settings = checkpoint(name), traffic(name), _SETTINGS[kind]
    if name == "gemma3-vision" and "num_blocks" in settings:
        settings = {**settings, "num_blocks": 28}
    answers, stats = serve(model.directory, requests, dtype="float32", **settings)
    check(model, requests, answers)
    if "num_blocks" in settings:
        assert stats.counters.preemptions > 0
    assert stats.counters.encoded_images >= 12


@pytest.mark.parametrize(
    ("name", "with_head"), [("smolvlm", True), ("qwen2.5-vl", False), ("gemma3-vision", False)]
)
def test_text_only_draft_models_change_no_token(
    with_head: bool, name: str, checkpoint: SaveModel, tmp_path: Path
) -> None:
    model, requests = checkpoint(name), traffic(name)
    draft = model.directory
    if with_head:
        draft = save_eagle3(model, tmp_path, layer_ids=[0, 1, 2]).directory
    drafting: dict[str, Any] = {"speculative_model": str(draft)}
    answers, stats = serve(model.directory, requests, dtype="float32", **drafting)
    check(model, requests, answers)
    assert stats.counters.spec_draft_tokens > 0
    if not with_head:
        assert stats.counters.spec_accepted_tokens > 0


@ALL
def test_repeated_prompt_is_cached_unless_image_differs(name: str, checkpoint: SaveModel) -> None:
    model = checkpoint(name)
    requests = [
        show(id, text(6), shown, text(20), name=name) for id, shown in enumerate((3, 3, 6), 1)
    ]
    one_by_one = [replace(each, exclusive_steps=1000) for each in requests]
    answers, stats = serve(model.directory, one_by_one, dtype="float32")
    check(model, requests, answers)
    length = len(requests[0].prompt_token_ids)
    assert stats.counters.prefix_cache_hits == length // 8 * 8
    assert stats.counters.encoded_images == 2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("smolvlm", "float32"), ("qwen2.5-vl", "bfloat16"), ("gemma3-vision", "float32")],
)
def test_request_continues_on_other_engine_with_same_tokens(
    name: str, dtype: str, checkpoint: SaveModel
) -> None:
    model, requests = checkpoint(name), traffic(name)
    settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": True}
    for each in (2, 5):
        requests[each] = replace(
            requests[each], sampling=replace(requests[each].sampling, temperature=0.7)
        )
    whole, _ = serve(model.directory, requests, **settings)
    moved = [
        replace(each, output_token_ids=answer.tokens[:5])
        for each, answer in zip(requests[2:], whole[2:], strict=True)
    ]
    rest, _ = serve(model.directory, moved, max_num_encoder_tokens=4, **settings)
    assert [each.tokens for each in rest] == [each.tokens[5:] for each in whole[2:]]


@pytest.mark.processor
def test_kv_tiers_distinguish_images(checkpoint: SaveModel, tmp_path: Path) -> None:
    name = "smolvlm"
    model = checkpoint(name)
    tiers = {"kv_disk_tier_dir": str(tmp_path), "kv_disk_tier_bytes": 1 << 24}
    first = [show(1, text(6), 0, text(20), name=name)]
    serve(model.directory, first, dtype="float32", tiers=tiers)
    requests = [show(id, text(6), shown, text(20), name=name) for id, shown in ((2, 3), (3, 0))]
    answers, stats = serve(model.directory, requests, dtype="float32", tiers=tiers)
    check(model, requests, answers)
    assert stats.counters.kv_tier_hits == (len(first[0].prompt_token_ids) - 1) // 8 * 8


@pytest.mark.parametrize(
    ("name", "shards", "stages", "scheduling"),
    [
        ("smolvlm", 2, 2, {"speculative_ngram": 3}),
        ("qwen2.5-vl", 2, 1, {"async_scheduling": True, "speculative_ngram": 3}),
        ("gemma3-vision", 2, 1, {"speculative_model": "own"}),
        ("gemma3-vision", 1, 2, {}),
        ("mistral3", 2, 2, {"speculative_ngram": 3}),
        ("internvl", 2, 1, {"async_scheduling": True}),
    ],
)
def test_sharded_model_sees_images_like_one_process(
    name: str, shards: int, stages: int, scheduling: dict[str, Any], checkpoint: SaveModel
) -> None:
    model, requests = checkpoint(name), traffic(name)
    if "speculative_model" in scheduling:
        scheduling = {"speculative_model": str(model.directory)}
    answers, counters = serve_in_processes(
        model.directory, {}, requests, shards, stages, **scheduling
    )
    check(model, requests, answers)
    assert counters.encoded_images >= 12


def serve_in_processes(
    directory: Path,
    model: dict[str, Any],
    requests: list[AddRequest],
    shards: int,
    stages: int,
    **scheduling: Any,
) -> tuple[list[Answer], EngineCounters]:
    step = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "max_num_encoder_tokens": 4}
    config = config_of(
        directory,
        model=model,
        cache={"num_kv_blocks": 100, "encoder_cache_bytes": 1},
        scheduler=step | scheduling,
        parallel={"tensor_parallel_size": shards, "pipeline_parallel_size": stages},
    )
    executor = InProcessExecutor(config, team=Team(config, 0, 1))
    try:
        (tokens, _, _), counters = serve_steps(executor, config, requests)
    finally:
        executor.shutdown()
    return [Answer(tokens[each.id], "length", []) for each in requests], counters


@pytest.mark.parametrize(
    ("name", "quantization", "dtype", "most"),
    [
        ("smolvlm", "int4", "bfloat16", 0.6),
        ("qwen2.5-vl", "int8", "float32", 0.05),
        ("mistral3", "int4", "bfloat16", 0.6),
    ],
)
def test_sharded_quantized_model_sees_images(
    name: str, quantization: Any, dtype: Any, most: float, checkpoint: SaveModel
) -> None:
    model = checkpoint(name)
    requests = [each for each in traffic(name) if each.encoder_inputs]
    kind = {"dtype": dtype, "quantization": quantization}
    answers, _ = serve_in_processes(model.directory, kind, requests, 2, 1)
    short = []
    for each, answer in zip(requests, answers, strict=True):
        known = each.prompt_token_ids + answer.tokens[:-1]
        logits = model.logits_with_images(known, each.encoder_inputs)
        logits = logits[len(each.prompt_token_ids) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
        short.append((logits.amax(1) - chosen) / logits.std(1))
    # Of transformers' logits in full precision; a random token is 2.5 deviations below the best.
    assert torch.cat(short).mean() < most


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({}, None),
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, None),
        (
            {"scheduler": SchedulerConfig(max_num_batched_tokens=19, max_num_seqs=4)},
            "--max-num-batched-tokens 19",
        ),
        (
            {"scheduler": SchedulerConfig(long_prefill_token_threshold=15)},
            "--long-prefill-token-threshold 15",
        ),
    ],
)
def test_gemma_refuses_images_if_they_cannot_be_in_one_step(
    parts: dict[str, Any], reason: str | None, checkpoint: SaveModel
) -> None:
    directory = checkpoint("gemma3-vision").directory
    gemma, other = (read_spec(each).vision for each in (directory, checkpoint("smolvlm").directory))
    assert gemma is not None
    assert other is not None
    config = EngineConfig(model=ModelConfig(model=str(directory)), **parts)
    assert image_refusal(config, other) is None
    found = image_refusal(config, gemma)
    assert found is None if reason is None else reason in (found or "")


def test_gemma_without_images_serves_text(
    checkpoint: SaveModel, caplog: pytest.LogCaptureFixture
) -> None:
    directory, step = checkpoint("gemma3-vision").directory, {"long_prefill_token_threshold": 8}
    executor = InProcessExecutor(config_of(directory, scheduler=step))
    assert executor.info.vision is None
    assert "images are not accepted with --long-prefill-token-threshold 8" in caplog.text
    executor.shutdown()


def test_mistral_without_transformers_serves_text(
    checkpoint: SaveModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    executor = InProcessExecutor(config_of(checkpoint("mistral3").directory))
    assert executor.info.vision is None
    assert "images are not accepted with a vision encoder of transformers" in caplog.text
    executor.shutdown()


def test_a_vision_encoder_need_not_be_loaded(checkpoint: SaveModel) -> None:
    directory = checkpoint("gemma3-vision").directory
    executor = InProcessExecutor(config_of(directory, model={"language_model_only": True}))
    assert executor.info.vision is None
    assert executor.weight_transfer().phase == "none", "a trainer may replace what is left"
    executor.shutdown()


def test_vision_weights_freed_and_reloaded_give_same_results(checkpoint: SaveModel) -> None:
    directory = checkpoint("smolvlm").directory
    executor = InProcessExecutor(config_of(directory))
    assert executor.info.vision == read_spec(directory).vision
    before = executor._loaded.vision
    assert before is not None
    image = encoder_input(1, 0, num_tokens=4)
    embeddings = before.encode(image.pixels, 32, 32)
    executor.sleep(2)
    assert executor._holder.loaded is None
    executor.wake_up()
    again = executor._loaded.vision
    assert again is not None
    assert torch.equal(again.encode(image.pixels, 32, 32), embeddings)
    executor.shutdown()
