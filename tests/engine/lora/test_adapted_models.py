"""Each row of a batch is computed as by the model with its adapter merged."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from engine.lora.adapter_config import BadAdapter
from engine.lora.modules import AdaptableModules
from engine.lora.store import AdapterStore
from engine.lora.weights import adapter_weights
from engine.models.hf_config import read_spec
from engine.models.loading.decoder import AdapterCapacity
from engine.shared.config import BUNDLED_MODEL, ModelConfig
from engine.shared.model_files import model_directory
from tests.engine.images import encoder_input
from tests.engine.lora.adapters import TEXT_OF_SEEING_MODELS, exact, train
from tests.engine.tiny_models import IMAGE_TOKEN, Checkpoint

ROOM = AdapterCapacity(3, 8)
TOLERANCE = 5e-4
"""Of logits of up to 10 in single precision: processors add up in different orders."""


def load(driver: Any, model: Path, *adapters: Path, **settings: Any) -> Any:
    """Return a driver with these adapters in its slots."""
    engine = driver(model, adapters=ROOM, **settings)
    for slot, directory in enumerate(adapters):
        fill(engine, slot, directory, model)
    return engine


def fill(engine: Any, slot: int, adapter: Path, model: Path) -> None:
    """Put an adapter into a slot."""
    decoder = engine.runner.model
    files = model_directory(ModelConfig(model=str(model)), weights=False)
    modules = AdaptableModules(read_spec(files))
    store = AdapterStore(
        modules.max_size(ROOM.rank),
        lambda files: adapter_weights(files, modules.pairs(files, ROOM.rank), decoder.dtype),
    )
    decoder.load_adapter(slot, store[store.load(str(adapter), None).result()])
    store.shutdown()


FAMILIES = [
    "llama", "llama-tied-llama3", "llama-biased", "mistral-window", "qwen2", "qwen3", "gemma2",
    "gemma3", "phi3", "phi3-partial", "olmo2", "granite", "smollm3", "cohere", "cohere2", "glm",
    "glm4", "gpt-oss", "gpt-oss-mxfp4", "llama4",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "side", "count"),
    [("smolvlm", 32, 4), ("qwen2.5-vl", 16, 4), ("gemma3-vision", 32, 16), ("llava", 32, 16)],
)
def test_prompts_with_images_are_computed_with_their_adapters(
    name: str, side: int, count: int, checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model = checkpoint(name)
    adapter = trained(name, target_modules=TEXT_OF_SEEING_MODELS)
    engine = load(driver, model.directory, adapter.directory)
    text = [token % 250 for token in prompt(20)]
    tokens = [*text[:5], *[IMAGE_TOKEN] * count, *text[5:]]
    image = encoder_input(1, 5, num_tokens=count, side=side)
    for row, slot in enumerate((0, -1)):
        engine.start(row, tokens, adapter=slot, images=[image])
    size = len(tokens)
    logits = engine.logits({0: size, 1: size})
    for reference, found in zip((adapter.merged, model), logits.split(size), strict=True):
        expected = reference.logits_with_images(tokens, [image])
        assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "part", "module"),
    [
        ("smolvlm", "vision_model", "q_proj"),
        ("qwen2.5-vl", "visual", "qkv"),
        ("gemma3-vision", "vision_tower", "q_proj"),
        ("mistral3", "vision_tower", "q_proj"),
    ],
)
def test_adapters_of_vision_encoders_are_refused(
    name: str, part: str, module: str, checkpoint: Any, trained: Any
) -> None:
    model = checkpoint(name)
    adapter = trained(name, target_modules=rf".*{part}.*\.{module}")
    modules = AdaptableModules(read_spec(model.directory))
    store = AdapterStore(modules.max_size(ROOM.rank), lambda files: modules.pairs(files, ROOM.rank))
    with pytest.raises(BadAdapter, match=part):
        store.load(str(adapter.directory), None).result()
    store.shutdown()


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_mixed_batch_equal_merged_models(
    name: str, checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model = checkpoint(name)
    one, two = trained(name), trained(name, 2, r=8, lora_alpha=4, use_rslora=True)
    engine = load(driver, model.directory, one.directory, two.directory)
    references = {0: model, 1: one.merged, 2: two.merged, 3: one.merged, 4: model}
    lengths = {0: 20, 1: 33, 2: 7, 3: 1, 4: 60}
    for row, adapter in enumerate((-1, 0, 1, 0, -1)):
        engine.start(row, prompt(lengths[row]), adapter=adapter)
    logits = engine.logits(lengths)
    first = 0
    for row, length in lengths.items():
        expected = references[row].logits(prompt(length))
        assert (logits[first : first + length] - expected).abs().max() < TOLERANCE, row
        first += length


def test_adapters_apply_to_8_bit_weights(
    checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model, adapter = checkpoint("llama"), trained("llama")
    engine = load(driver, model.directory, adapter.directory, kv_cache_dtype="fp8")
    engine.start(0, prompt(40), adapter=0)
    logits = engine.logits({0: 40})
    adapted, plain = (
        float((logits - each.logits(prompt(40))).norm(dim=1).median())
        for each in (adapter.merged, model)
    )
    assert TOLERANCE < adapted < 0.5 * plain


def test_generated_tokens_equal_those_of_each_rows_model(
    checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model, one, two = checkpoint("llama"), trained("llama"), trained("llama", 2, r=8)
    engine = load(driver, model.directory, one.directory, two.directory)
    for row, adapter in enumerate((0, 1, -1)):
        engine.start(row, prompt(30), adapter=adapter)
    engine.prefill(0, 1, 2)
    engine.decode(20, 0, 2, 1)
    for row, reference in enumerate((one.merged, two.merged, model)):
        generated = engine.tokens[row][30:]
        assert generated == reference.greedy(prompt(30), 21, generated)


def test_adapters_apply_to_embeddings_and_head(
    checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    for name in ("llama", "granite", "cohere"):
        model, plain = checkpoint(name), trained(name)
        whole = trained(name, 3, target_modules=["embed_tokens", "lm_head", "q_proj"])
        engine = load(driver, model.directory, whole.directory, plain.directory)
        for row, adapter in enumerate((0, -1, 1, 0)):
            engine.start(row, prompt(12 + row), adapter=adapter)
        logits = engine.logits({0: 12, 1: 13, 2: 14, 3: 15})
        first = 0
        for row, reference in enumerate((whole.merged, model, plain.merged, whole.merged)):
            expected = reference.logits(prompt(12 + row))
            assert (logits[first : first + 12 + row] - expected).abs().max() < TOLERANCE, (
                name,
                row,
            )
            first += 12 + row


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r".*\.[02]\.self_attn\.(q|v)_proj"},
        {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8}},
        {"alpha_pattern": {"self_attn.v_proj": 1, "layers.0.mlp.gate_proj": 30}},
    ],
)
def test_targets_and_patterns_match_like_peft(
    config: dict[str, Any], checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    adapter = trained("llama", 5, **config)
    engine = load(driver, checkpoint("llama").directory, adapter.directory)
    engine.start(0, prompt(25), adapter=0)
    assert (engine.logits({0: 25}) - adapter.merged.logits(prompt(25))).abs().max() < TOLERANCE


SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {"target_modules": "all-linear", "r": 2},  # with the router; gates and ups: rank 4
    "qwen3-moe": {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
    "qwen3-moe-some-dense": {"target_modules": ["q_proj", "gate"], "r": 1},
    "granite-moe": {
        "target_modules": ["v_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
        "rank_pattern": {r"layers\.1\..*down_proj": 3},
        "alpha_pattern": {"experts.gate_up_proj": 2},
    },
    "glm4-moe": {"target_modules": "all-linear", "r": 2},
    "gpt-oss": {  # gates and ups alternate
        "target_modules": ["v_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
    },
}


@pytest.mark.parametrize("name", SPARSE)
def test_adapters_apply_to_experts_and_routers(
    name: str, checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model = checkpoint(name)
    attention = trained(name, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    one, two = trained(name, 2, **SPARSE[name]), trained(name, 3, **SPARSE[name])
    engine = load(driver, model.directory, one.directory, attention.directory, two.directory)
    references = [one.merged, model, two.merged, attention.merged, one.merged]
    for row, adapter in enumerate((0, -1, 2, 1, 0)):
        engine.start(row, prompt(17 + row), adapter=adapter)
    logits = engine.logits({row: 17 + row for row in range(5)})
    expected = [reference.logits(prompt(17 + row)) for row, reference in enumerate(references)]
    assert (logits - torch.cat(expected)).abs().max() < TOLERANCE


def test_adapters_of_single_experts_are_read(
    checkpoint: Any, driver: Any, prompt: Any, tmp_path: Path
) -> None:
    for name, names, router in (
        ("mixtral", ("w1", "w3", "w2"), "block_sparse_moe.gate"),
        ("qwen3-moe", ("gate_proj", "up_proj", "down_proj"), "mlp.gate"),
    ):
        model = checkpoint(name)
        merged = copy.deepcopy(model.reference)
        tensors, block = {}, f"model.layers.1.{router.rsplit('.', 1)[0]}."
        moe = merged.model.layers[1].mlp
        inner = moe.experts.down_proj.shape[-1]
        parts = {
            names[0]: moe.experts.gate_up_proj.data[2, :inner],
            names[1]: moe.experts.gate_up_proj.data[2, inner:],
            names[2]: moe.experts.down_proj.data[2],
        }
        modules = {f"{block}experts.2.{part}": weight for part, weight in parts.items()}
        modules[f"model.layers.1.{router}"] = moe.gate.weight.data
        for seed, (module, weight) in enumerate(modules.items()):
            generator = torch.Generator().manual_seed(seed)
            outputs, inputs = weight.shape
            a, b = (0.3 * torch.randn(4, width, generator=generator) for width in (inputs, outputs))
            weight += 2 * b.T @ a
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.T.contiguous()
        directory = tmp_path / name
        directory.mkdir()
        save_file(tensors, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
        engine = load(driver, model.directory, directory)
        engine.start(0, prompt(40), adapter=0)
        expected = Checkpoint(directory, merged).logits(prompt(40))
        assert (expected - model.logits(prompt(40))).abs().max() > 0.1
        assert (engine.logits({0: 40}) - expected).abs().max() < TOLERANCE


def test_reused_slot_has_no_traces_of_previous_adapter(
    checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model = checkpoint("llama")
    everything = trained("llama", 3, target_modules=["embed_tokens", "lm_head", "q_proj", "o_proj"])
    little = trained("llama", 4, target_modules=["v_proj"], r=1)
    fresh = load(driver, model.directory, little.directory)
    fresh.start(0, prompt(9), adapter=0)
    expected = fresh.logits({0: 9})
    engine = load(driver, model.directory, everything.directory)
    engine.start(0, prompt(9), adapter=0)
    assert not torch.equal(engine.logits({0: 9}), expected)
    fill(engine, 0, little.directory, model.directory)
    engine.start(1, prompt(9), adapter=0)
    assert torch.equal(engine.logits({1: 9}), expected)


def test_many_rows_are_gathered_by_slot_with_the_same_result(
    checkpoint: Any, trained: Any, driver: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, one, two = checkpoint("llama"), trained("llama"), trained("llama", 2, r=8)
    found = []
    for most in (10**6, 0):
        monkeypatch.setattr("engine.models.adapters._MASKED_ROWS", most)
        engine = load(driver, model.directory, one.directory, two.directory)
        for row, adapter in enumerate((0, -1, 1)):
            engine.start(row, prompt(40), adapter=adapter)
        found.append(engine.logits({0: 40, 1: 40, 2: 40}))
    assert (found[0] - found[1]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_batch_invariant_rows_do_not_depend_on_batch_or_slot(
    name: str, checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model = checkpoint(name)
    one, two = trained(name, r=3).directory, trained(name, 2, r=4).directory
    alone = load(driver, model.directory, one, batch_invariant=True)
    alone.start(0, prompt(21), adapter=0)
    expected = alone.logits({0: 21})
    mixed = load(driver, model.directory, two, two, one, batch_invariant=True)
    mixed.start(3, prompt(30), adapter=0)
    mixed.start(1, prompt(21), adapter=2)
    mixed.start(2, prompt(5))
    assert torch.equal(mixed.logits({3: 30, 1: 21, 2: 5})[30:51], expected)


def test_quantized_base_does_not_quantize_adapters(
    checkpoint: Any, trained: Any, driver: Any, prompt: Any
) -> None:
    model, adapter = checkpoint("llama"), trained("llama")
    engine = load(driver, model.directory, adapter.directory, quantization="int8", dtype="float32")
    for row in range(2):
        engine.start(row, prompt(30), adapter=row - 1)
    logits = engine.logits({0: 30, 1: 30})
    change = adapter.merged.logits(prompt(30)) - model.logits(prompt(30))
    error = (logits[30:] - logits[:30]) - change
    assert error.abs().mean() < 0.2 * change.abs().mean()


def test_bundled_model_supports_adapters(
    driver: Any, prompt: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundled: Any = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="float32")
    model = Checkpoint(BUNDLED_MODEL, bundled.eval())
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    one, two = (
        train(model, tmp_path_factory.mktemp("adapter"), seed, r=8, target_modules=targets)
        for seed in (1, 2)
    )
    engine = load(driver, model.directory, one.directory, two.directory, dtype="float32")
    for row, adapter in enumerate((1, -1, 0)):
        engine.start(row, prompt(40 + row), adapter=adapter)
    logits = engine.logits({0: 40, 1: 41, 2: 42})
    expected = [
        reference.logits(prompt(40 + row))
        for row, reference in enumerate((two.merged, model, one.merged))
    ]
    assert (logits - torch.cat(expected)).abs().max() < TOLERANCE


def test_rows_with_large_logits_differ_only_by_float32_rounding(
    checkpoint: Any, driver: Any, prompt: Any, tmp_path: Path
) -> None:
    """How far two computations are apart grows with what they compute: both are held to float64."""
    reference = copy.deepcopy(checkpoint("llama-deep").reference)
    with torch.no_grad():
        largest = reference(torch.tensor([prompt(60)])).logits.abs().max()
        reference.lm_head.weight.mul_(33.0 / largest)
    reference.save_pretrained(tmp_path / "model")
    model = Checkpoint(tmp_path / "model", reference)
    one, two = (train(model, tmp_path / str(seed), seed, r=8) for seed in (1, 2))
    engine = load(driver, model.directory, one.directory, two.directory)
    lengths = {0: 60, 1: 33, 2: 40}
    for row, adapter in enumerate((1, -1, 0)):
        engine.start(row, prompt(lengths[row]), adapter=adapter)
    logits, first = engine.logits(lengths), 0
    for row, (merged, directory) in enumerate(
        ((two.merged, two.directory), (model, None), (one.merged, one.directory))
    ):
        true = exact(model, directory).logits(prompt(lengths[row]))
        theirs = merged.logits(prompt(lengths[row])) - true
        ours = logits[first : first + lengths[row]] - true
        assert ours.square().mean() <= 4 * theirs.square().mean(), row
        assert ours.abs().max() <= 4 * theirs.abs().max(), row
        first += lengths[row]
