"""transformers models over the paged KV cache match transformers on whole sequences."""

import json
import logging
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.executor.loading import load_model
from engine.models.attention.kv_format import KvCacheDtype
from engine.models.fallback.choice import check_fallback, implementation
from engine.models.fallback.loading import load_fallback
from engine.models.families.registry import FAMILIES
from engine.models.formats.files import CheckpointError
from engine.models.spec import UnsupportedModel
from engine.runner.model_runner import ModelRunner
from engine.shared.config import (
    BUNDLED_MODEL,
    EngineConfig,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
)
from scripts.write_fallback_doc import TARGET, refused
from tests.engine.driver import BLOCK_SIZE, NUM_BLOCKS, Driver
from tests.engine.fallback_models import WINDOW, save_fallback_model
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.serving import request, serve
from tests.engine.tiny_models import Checkpoint

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window_pattern": 2},
    "gpt2": {},
    "gpt_neox": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "nemotron": {},
    "olmo": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phimoe": {},
    "qwen2_moe": {},
    "starcoder2": {},
}
KINDS_OF_CACHE = ("exaone4", "opt", "phimoe", "starcoder2")
"""Layers with and without windows, positions that are learned, windows of masks alone, windows."""


class Fallbacks:
    """Each model is written once, by a name of `MODELS`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._saved: dict[str, Checkpoint] = {}

    def __call__(self, kind: str) -> Checkpoint:
        if kind not in self._saved:
            directory = self._directory / kind
            self._saved[kind] = save_fallback_model(kind, directory, **MODELS[kind])
        return self._saved[kind]


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Fallbacks:
    torch.set_num_threads(1)
    return Fallbacks(tmp_path_factory.mktemp("fallback"))


def load_driver(directory: Path, kept: KvCacheDtype = "auto", **settings: Any) -> Driver:
    settings = {"dtype": "float32", **settings}
    config = ModelConfig(model=str(directory), **settings)
    loaded = load_fallback(directory, config, CPU, kv_cache_dtype=kept)
    return Driver(
        ModelRunner(
            loaded.model,
            max_num_seqs=8,
            max_model_len=200,
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        )
    )


@pytest.mark.parametrize("kind", MODELS)
def test_chunks_in_mixed_batches_give_logits_of_transformers(
    kind: str, fallback: Fallbacks, prompt: MakePrompt
) -> None:
    model = fallback(kind)
    engine = load_driver(model.directory)
    one, other = prompt(90), prompt(50)
    engine.start(3, one)
    engine.start(1, other)
    first = engine.logits({3: 30, 1: 10})
    second = engine.logits({1: 1, 3: 59})
    third = engine.logits({3: 1, 1: 39})
    of_one = torch.cat((first[:30], second[1:], third[:1]))
    of_other = torch.cat((first[30:], second[:1], third[1:]))
    assert (of_one - model.logits(one)).abs().max() < 1e-3
    assert (of_other - model.logits(other)).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS_OF_CACHE)
def test_greedy_tokens_after_cached_prefix_equal_transformers(
    kind: str, fallback: Fallbacks, prompt: MakePrompt
) -> None:
    model = fallback(kind)
    engine = load_driver(model.directory)
    shared = prompt(32)
    engine.start(0, shared + prompt(9))
    engine.prefill(0)
    other = shared + prompt(11)
    engine.start(1, other, cached_blocks=engine.blocks[0][:4])
    engine.prefill(1)
    engine.decode(63, 1, 0)
    assert engine.tokens[1][43:] == model.greedy(other, 64)
    assert engine.tokens[0][41:62] == model.greedy(shared + prompt(9), 21)


@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 33}, {"async_scheduling": True}, {"speculative_ngram": 4}],
    ids=["few blocks", "overlapped", "drafted"],
)
@pytest.mark.parametrize("kind", ["gpt2", "starcoder2"])
def test_scheduling_does_not_change_answers(
    kind: str, options: dict[str, Any], fallback: Fallbacks, prompt: MakePrompt
) -> None:
    model = fallback(kind)
    prompts = [prompt(60), prompt(9) * 3, prompt(3), prompt(50)]
    requests = [
        request(id, each, temperature=0.0, max_tokens=40) for id, each in enumerate(prompts)
    ]
    answers, stats = serve(model.directory, requests, dtype="float32", **options)
    assert [answer.tokens for answer in answers] == [model.greedy(each, 40) for each in prompts]
    counters = stats.counters
    assert (counters.spec_draft_tokens > 0) == ("speculative_ngram" in options)
    # All layers of starcoder2 slide, so that what is behind their window is given back in time.
    assert (counters.preemptions > 0) == ("num_blocks" in options and kind == "gpt2")


@pytest.mark.parametrize("has_draft", [False, True], ids=["alone", "with a draft model"])
def test_layers_with_windows_have_blocks_of_their_own(
    has_draft: bool, fallback: Fallbacks, prompt: MakePrompt, checkpoint: SaveModel
) -> None:
    model = fallback("exaone4")
    draft = str(checkpoint("llama").directory) if has_draft else None
    shared = prompt(40)
    prompts = [shared + prompt(30)[count:] for count in (2, 11, 19, 28)] * 3
    requests = [
        request(id, [*each[:-1], id], temperature=0.0, max_tokens=40)
        for id, each in enumerate(prompts)
    ]
    answers, stats = serve(
        model.directory, requests, dtype="float32", num_blocks=30, speculative_model=draft
    )
    for sent, answer in zip(requests, answers, strict=True):
        assert answer.tokens == model.greedy(sent.prompt_token_ids, 40)
    assert stats.counters.prefix_cache_hits > 0
    assert (stats.counters.spec_draft_tokens > 0) == has_draft


def test_fallback_model_is_sharded_like_a_family(fallback: Fallbacks) -> None:
    directory = str(fallback("exaone4").directory)
    settings = ModelConfig(model=directory, dtype="float32", max_model_len=200)
    loaded = load_model(EngineConfig(model=settings), CPU, lambda _: None).model
    assert set(loaded.spec.cache_groups.windows) == {WINDOW, None}
    assert [len(windows) for windows in loaded.windows] == [1] * len(loaded.windows) != [1]


def test_sixteen_bits_stay_close(fallback: Fallbacks, prompt: MakePrompt) -> None:
    model = fallback("phi")
    engine = load_driver(model.directory, dtype="bfloat16")
    assert engine.runner.model.kv_format.dtype == torch.bfloat16
    engine.start(0, prompt(40))
    expected = model.logits(prompt(40))
    difference = engine.logits({0: 40}).float() - expected
    assert difference.abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("kind", ["phi", "starcoder2"])
def test_keys_and_values_in_8_bits_stay_close(
    kind: str, fallback: Fallbacks, prompt: MakePrompt
) -> None:
    model = fallback(kind)
    engine = load_driver(model.directory, kept="fp8")
    engine.start(0, prompt(60))
    logits, expected = engine.logits({0: 60}), model.logits(prompt(60))
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-3 < errors.median() < 0.2


def test_layers_see_no_farther_than_their_windows(fallback: Fallbacks) -> None:
    model = load_driver(fallback("starcoder2").directory).runner.model
    assert model.windows == [{WINDOW}]
    mixed = load_driver(fallback("exaone4").directory).runner.model
    assert mixed.windows == [{WINDOW, None}]
    # The windows of these are in masks only.
    assert load_driver(fallback("phimoe").directory).runner.model.windows == [{WINDOW}]
    assert load_driver(fallback("qwen2_moe").directory).runner.model.windows == [{WINDOW, None}]


def test_untestable_window_is_refused(fallback: Fallbacks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.fallback.loading.narrow_windows", lambda _: nullcontext())
    with pytest.raises(UnsupportedModel, match=f"window of {WINDOW} tokens is longer than the"):
        load_driver(fallback("phimoe").directory)


def test_model_with_custom_attention_fails_trial(
    fallback: Fallbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was when windows of masks were not seen."""
    monkeypatch.setattr(
        "engine.models.fallback.attention.window_mask",
        lambda *_, q_length, kv_length, **__: torch.zeros(
            1, 1, q_length, kv_length, dtype=torch.int32
        ),
    )
    with pytest.raises(UnsupportedModel, match="its results in chunks and batches differ"):
        load_driver(fallback("phimoe").directory)


def test_dummy_weights_depend_on_the_seed_only(fallback: Fallbacks, prompt: MakePrompt) -> None:
    directory = fallback("opt").directory

    def logits(seed: int) -> torch.Tensor:
        engine = load_driver(directory, load_format="dummy", seed=seed)
        engine.start(0, prompt(10))
        return engine.logits({0: 10})

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_family_is_preferred_unless_fallback_is_requested(
    fallback: Fallbacks, checkpoint: SaveModel, prompt: MakePrompt, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint("llama")
    of_family = ModelConfig(model=str(model.directory))
    assert implementation(model.directory, of_family) == "swell"
    assert implementation(fallback("opt").directory, ModelConfig()) == "transformers"
    with caplog.at_level(logging.INFO):
        engine = load_driver(model.directory, model_impl="transformers")
    assert "LlamaForCausalLM" in caplog.text
    assert "computed by transformers" in caplog.text
    engine.start(0, prompt(60))
    assert (engine.logits({0: 60}) - model.logits(prompt(60))).abs().max() < 1e-3


def test_bundled_model_gives_same_answers_by_family_and_fallback(
    prompt: MakePrompt, driver: LoadDriver
) -> None:
    engines = (
        driver(BUNDLED_MODEL, dtype="float32"),
        load_driver(BUNDLED_MODEL, model_impl="transformers"),
    )
    for engine in engines:
        engine.start(0, prompt(40))
    one, other = (engine.logits({0: 40}) for engine in engines)
    assert (one - other).abs().max() < 1e-3


def test_swell_implementation_refuses_models_without_family(fallback: Fallbacks) -> None:
    settings = ModelConfig(model=str(fallback("opt").directory), model_impl="swell")
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM is not supported; supported are"):
        load_model(EngineConfig(model=settings), CPU, lambda _: None)


@pytest.mark.parametrize(
    ("flag", "changed"),
    [
        ("--tensor-parallel-size", {"parallel": ParallelConfig(tensor_parallel_size=2)}),
        ("--pipeline-parallel-size", {"parallel": ParallelConfig(pipeline_parallel_size=2)}),
        ("--enable-expert-parallel", {"parallel": ParallelConfig(enable_expert_parallel=True)}),
        ("--enable-lora", {"lora": LoraConfig(enable_lora=True)}),
        ("--batch-invariant", {"executor": ExecutorConfig(batch_invariant=True)}),
        ("--quantization", {"model": ModelConfig(quantization="int8")}),
    ],
)
def test_settings_that_need_a_family_are_refused(flag: str, changed: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{flag}: not for models"):
        check_fallback(msgspec.structs.replace(EngineConfig(), **changed))
    check_fallback(EngineConfig())


def test_fallback_refuses_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    settings = ModelConfig(model=str(path), model_impl="transformers")
    with pytest.raises(UnsupportedModel, match=r"^a GGUF file: not for models"):
        check_fallback(EngineConfig(model=settings))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "recurrent state"),
        ({"model_type": "jamba", "architectures": ["JambaForCausalLM"]}, "recurrent state"),
        (
            {"model_type": "bloom", "architectures": ["BloomForCausalLM"]},
            "does not use the attention interface",
        ),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "an encoder-decoder model",
        ),
        (
            {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
            "it is multimodal",
        ),
        (
            {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}},
            "code from its repository, which is never run",
        ),
        ({"model_type": "own", "architectures": ["Own"]}, "does not support it"),
        ({"model_type": "opt", "architectures": ["OPTModel"]}, "not a causal language model"),
        (
            {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]},
            "scaled by index in a step",
        ),
        (
            {
                "model_type": "roberta-prelayernorm",
                "architectures": ["RobertaPreLayerNormForCausalLM"],
            },
            "start after its padding token",
        ),
        (
            {
                "model_type": "phi",
                "architectures": ["PhiForCausalLM"],
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            "its dynamic rotary embedding",
        ),
        (
            {
                "model_type": "opt",
                "architectures": ["OPTForCausalLM"],
                "quantization_config": {"quant_method": "gptq", "bits": 4},
            },
            "its checkpoint is quantized",
        ),
    ],
)
def test_unsupported_models_are_refused_with_reason(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load_fallback(tmp_path, ModelConfig(model=str(tmp_path)), CPU)
    assert config["architectures"][0] in str(caught.value)


def test_model_with_state_beyond_kv_fails_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.fallback.loading.check_class", lambda *_: None)
    save_fallback_model("lfm2", tmp_path, layer_types=["conv", "full_attention"])
    with pytest.raises(UnsupportedModel, match="its results in chunks and batches differ"):
        load_driver(tmp_path)


@pytest.mark.parametrize("model_type", ["roberta", "roberta-prelayernorm"])
def test_model_with_custom_positions_fails_trial(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.fallback.loading.check_class", lambda *_: None)
    save_fallback_model(model_type, tmp_path, pad_token_id=1)
    with pytest.raises(UnsupportedModel, match="its results in chunks and batches differ"):
        load_driver(tmp_path)


def test_the_page_lists_every_causal_model() -> None:
    page = TARGET.read_text(encoding="utf-8")
    assert f"transformers {transformers.__version__} are served" in page, (
        "run scripts/write_fallback_doc.py"
    )
    listed = set(re.findall(r"\w+", page))
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(FAMILIES) <= listed
    assert "WRONG" not in listed


def test_model_too_large_for_the_page_is_not_listed_as_refused() -> None:
    error = UnsupportedModel("x: it cannot be served: some tensor of 9 GB")
    assert refused(error).reason == "some tensor of 9 GB"
    for cause in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: ...")):
        error.__cause__ = cause
        assert refused(error).reason.startswith("not tried: ")


def test_missing_weights_are_an_error(fallback: Fallbacks, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = fallback("opt").directory
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        load_driver(tmp_path)
    weights = load_file(source / "model.safetensors")
    weights.pop("model.decoder.layers.1.fc1.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing model\.decoder\.layers\.1\.fc1\.weight"):
        load_driver(tmp_path)


def test_missing_transformers_gives_install_command(
    fallback: Fallbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fallback("opt").directory
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match="pip install 'transformers"):
        load_fallback(directory, ModelConfig(model=str(directory)), CPU)
