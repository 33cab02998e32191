"""Quantized weights are dequantized according to their formats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from engine.models.families.registry import family_of
from engine.models.formats.checkpoint import SafetensorsCheckpoint
from engine.models.formats.files import CheckpointError
from engine.models.hf_config import read_spec
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.models.weights import stored_tensors
from tests.engine.quantized_files import Written, awq, dense, fp8, gptq

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
DEEPSEEK = {
    **CONFIG,
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 48,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


WriteWeight: TypeAlias = Callable[[Any, int], Written]
WriteModel: TypeAlias = Callable[..., tuple[Path, ModelSpec, dict[str, torch.Tensor]]]


@pytest.fixture
def model(tmp_path: Path) -> WriteModel:
    """Write a checkpoint whose projections another function writes; return its directory."""

    def write(
        quantization: dict[str, Any],
        write_weight: WriteWeight,
        *,
        more: dict[str, torch.Tensor] | None = None,
        config: dict[str, Any] = CONFIG,
    ) -> tuple[Path, ModelSpec, dict[str, torch.Tensor]]:
        content = {**config, "quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(content))
        spec = read_spec(tmp_path)
        tensors, expected = {}, {}
        shapes = stored_tensors(family_of(spec.architecture).weights(spec))
        for seed, (name, shape) in enumerate(shapes.items()):
            if "_proj" not in name:
                tensors[name] = torch.randn(shape)
                continue
            written = write_weight(shape, seed)
            base = name.removesuffix("weight")
            tensors |= {base + part: tensor for part, tensor in written.parts.items()}
            expected[name] = written.weight
        save_file(tensors | (more or {}), tmp_path / "model.safetensors")
        return tmp_path, spec, expected

    return write


def _assert_equal(
    directory: Path, spec: ModelSpec, expected: dict[str, torch.Tensor], *, tolerance: float = 1e-6
) -> None:
    checkpoint = SafetensorsCheckpoint(directory, spec)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            checkpoint.tensor(name), tensor, rtol=tolerance, atol=tolerance, msg=name
        )


@pytest.mark.parametrize("order", ["", "plain", "random"])
@pytest.mark.parametrize(("bits", "version"), [(4, 1), (4, 2), (8, 1)])
def test_gptq_weights_are_read(model: WriteModel, bits: int, version: int, order: str) -> None:
    config = {**GPTQ, "bits": bits, "checkpoint_format": ["", "gptq", "gptq_v2"][version]}
    _assert_equal(
        *model(config, lambda s, i: gptq(s, bits=bits, version=version, order=order, seed=i))
    )


def test_awq_weights_are_read(model: WriteModel) -> None:
    _assert_equal(*model(AWQ, lambda shape, seed: awq(shape, seed=seed)))


@pytest.mark.parametrize("block", [None, (40, 24), (128, 128)])
def test_fp8_weights_are_read(model: WriteModel, block: tuple[int, int] | None) -> None:
    config = {"quant_method": "fp8", "weight_block_size": list(block) if block else None}
    _assert_equal(*model(config, lambda shape, seed: fp8(shape, block=block, seed=seed)))


def test_deepseeks_blocks_of_fp8_are_read_in_the_order_of_rotated_pairs(model: WriteModel) -> None:
    directory, spec, expected = model(
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        lambda shape, seed: fp8(shape, block=(16, 16), seed=seed),
        config=DEEPSEEK,
    )
    checkpoint = SafetensorsCheckpoint(directory, spec)
    queries, pairs = "model.layers.0.self_attn.q_b_proj.weight", [0, 2, 4, 6, 1, 3, 5, 7]
    heads = expected[queries].view(4, 24, 24)
    ordered = torch.cat((heads[:, :16], heads[:, 16:][:, pairs]), dim=1).flatten(0, 1)
    torch.testing.assert_close(checkpoint.tensor(queries), ordered, rtol=1e-6, atol=1e-6)
    stored = expected["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    ordered = torch.cat((stored[:32], stored[32:][pairs]))
    kept = checkpoint.tensor("model.layers.0.self_attn.kv_a_proj.weight")
    torch.testing.assert_close(kept, ordered, rtol=1e-6, atol=1e-6)


SCHEMES = {
    "int4 groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 groups with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_are_read_like_its_package(model: WriteModel, name: str) -> None:
    form, arguments = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def write(shape: tuple[int, int], seed: int) -> Written:
        dense = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return _compress(dense, scheme, form)

    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    _assert_equal(*model({**COMPRESSED, "format": form, "config_groups": groups}, write))


def _compress(dense: torch.Tensor, scheme: QuantizationScheme, form: str) -> Written:
    arguments = scheme.weights
    assert arguments is not None
    size = arguments.group_size
    grouped = dense.view(len(dense), -1, size) if size else dense
    keep = arguments.strategy != "tensor"
    low = grouped.amin(-1, keepdim=not arguments.group_size) if keep else grouped.amin()
    high = grouped.amax(-1, keepdim=not arguments.group_size) if keep else grouped.amax()
    scale, zero = calculate_qparams(low, high, arguments)
    state = {"weight": dense, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(dict(state), scheme)
    weight = compressor.decompress(dict(packed), scheme)["weight"]
    assert not torch.equal(weight, dense)
    assert quantize(dense, scale, zero, arguments).unique().numel() > 8
    return Written({name: part.contiguous() for name, part in packed.items()}, weight.float())


def test_nvfp4_weights_are_read(model: WriteModel) -> None:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))

    def write(shape: tuple[int, int], seed: int) -> Written:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
        scales = torch.rand(shape[0], shape[1] // 16, generator=generator) + 0.5
        scales = scales.to(torch.float8_e4m3fn)
        spread = scales.float().repeat_interleave(16, 1) / 40.0
        parts = {
            "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([40.0]),
            "input_global_scale": torch.tensor([3.0]),
        }
        return Written(parts, table[codes.long()] * spread)

    _assert_equal(*model({**COMPRESSED, "format": "nvfp4-pack-quantized"}, write))


def test_zero_biases_and_cache_scales_are_ignored(model: WriteModel) -> None:
    prefix = "model.layers.0."
    more = {
        f"{prefix}self_attn.o_proj.bias": torch.zeros(64),
        f"{prefix}self_attn.k_scale": torch.ones(1),
    }
    _assert_equal(*model(AWQ, lambda shape, seed: awq(shape, seed=seed), more=more))
    more[f"{prefix}self_attn.o_proj.bias"][3] = 1.0
    directory, spec, _ = model(AWQ, lambda shape, seed: awq(shape, seed=seed), more=more)
    with pytest.raises(CheckpointError, match=r"unexpected .*o_proj\.bias"):
        SafetensorsCheckpoint(directory, spec)


def _without(part: str) -> WriteWeight:
    def write(shape: tuple[int, int], seed: int) -> Written:
        written = gptq(shape, order="plain", seed=seed)
        del written.parts[part]
        return written

    return write


def _changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> WriteWeight:
    def write(shape: tuple[int, int], seed: int) -> Written:
        written = gptq(shape, order="plain", seed=seed)
        written.parts[part] = change(written.parts[part])
        return written

    return write


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (_without("scales"), "no weight for"),
        (_without("qweight"), "no weight for"),
        (_changed("qweight", lambda words: words[1:]), "shape"),
        (_changed("scales", lambda scales: scales[:1]), "q_proj.*group is not one of the 1"),
        (_changed("g_idx", lambda order: order + 1), "q_proj.*group is not one of the 2"),
        (_changed("g_idx", lambda order: order[1:]), "q_proj.*do not fit"),
        (_changed("qzeros", lambda zeros: zeros[:, 1:].contiguous()), "q_proj.*do not fit"),
        (_changed("qweight", lambda words: words.float()), "packed weights are"),
    ],
)
def test_mismatched_parts_are_refused_by_name(
    model: WriteModel, write: WriteWeight, named: str
) -> None:
    directory, spec, expected = model(GPTQ, write)
    with pytest.raises(CheckpointError, match=named):
        _assert_equal(directory, spec, expected)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({**GPTQ, "bits": 3}, "bits is 3"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "block"),
        ({**COMPRESSED, "format": "marlin-24"}, "marlin-24"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("awq", "not an object"),
    ],
)
def test_unsupported_quantization_is_refused_before_loading(
    tmp_path: Path, quantization: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": quantization})
    )
    with pytest.raises(UnsupportedModel, match=named):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "write"),
    [(GPTQ, gptq), (AWQ, awq)],
)
def test_4_bit_weights_can_be_read_as_stored(
    model: WriteModel, quantization: dict[str, Any], write: Callable[..., Written]
) -> None:
    directory, spec, expected = model(quantization, lambda shape, seed: write(shape, seed=seed))
    checkpoint = SafetensorsCheckpoint(directory, spec)
    for name, tensor in expected.items():
        weights = checkpoint.int4(name)
        assert weights is not None
        torch.testing.assert_close(dense(weights), tensor)
    assert checkpoint.int4("model.embed_tokens.weight") is None


def test_reordered_or_wider_weights_cannot_be_read_as_stored(model: WriteModel) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    directory, spec, _ = model(GPTQ, lambda s, i: gptq(s, order="random", seed=i))
    assert SafetensorsCheckpoint(directory, spec).int4(name) is None
    directory, spec, _ = model({**GPTQ, "bits": 8}, lambda s, i: gptq(s, bits=8, seed=i))
    assert SafetensorsCheckpoint(directory, spec).int4(name) is None
