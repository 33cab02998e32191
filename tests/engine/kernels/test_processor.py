"""Compute dtypes, chosen by what the processor multiplies fast."""

import platform
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.executor.loading import max_head_threads, set_threads
from engine.kernels import processor
from engine.kernels.processor import Kind
from engine.models import settings
from engine.models.hf_config import read_spec
from engine.models.products.dense import PackedLinear
from engine.models.settings import compute_types, fits_caches, open_checkpoint
from engine.shared.config import BUNDLED_MODEL, EngineConfig, ExecutorConfig, ModelConfig
from tests.engine.fixtures import AsKind, LoadDriver, MakePrompt

BF16, F32 = torch.bfloat16, torch.float32
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pretend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, vendor: str, features: set[str]
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id : {vendor}\n")
    monkeypatch.setattr(processor, "_CPU_INFO", info)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("amx_tile", "avx512_bf16", "avx512", "avx2"):
        monkeypatch.setattr(
            torch.cpu, f"_is_{name}_supported", partial(features.__contains__, name)
        )


AVX512 = {"avx2", "avx512"}
BF16_512 = AVX512 | {"avx512_bf16"}


@pytest.mark.parametrize(
    ("vendor", "features", "expected"),
    [
        ("GenuineIntel", BF16_512 | {"amx_tile"}, Kind.AMX),
        ("GenuineIntel", BF16_512, Kind.AVX512_BF16),
        ("GenuineIntel", AVX512, Kind.AVX512),
        ("GenuineIntel", {"avx2"}, Kind.AVX2),
        ("AuthenticAMD", BF16_512, Kind.AMD_AVX512_BF16),
        ("AuthenticAMD", AVX512, Kind.AVX512),
        ("AuthenticAMD", {"avx2"}, Kind.AMD_AVX2),
        ("AuthenticAMD", set(), Kind.AVX2),
    ],
)
def test_kinds_differ_in_vendor_and_instructions(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    vendor: str,
    features: set[str],
    expected: Kind,
) -> None:
    pretend(monkeypatch, tmp_path, vendor=vendor, features=features)
    assert processor.detected_kind() is expected


@pytest.mark.parametrize("has_bf16", [True, False])
def test_other_architectures_ask_onednn_for_16_bit_support(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert processor.detected_kind() is (Kind.BF16 if has_bf16 else Kind.OTHER)


def test_a_kind_of_another_architecture_is_refused(
    monkeypatch: pytest.MonkeyPatch, as_kind: AsKind
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    as_kind("bf16")
    with pytest.raises(ValueError, match="SWELL_PROCESSOR=bf16: must be one of amx, "):
        processor.kind()


def types(
    device: torch.device = CPU, is_alone: bool = True, **settings: Any
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of activations and of the KV cache."""
    config = ModelConfig(**settings)
    spec = read_spec(BUNDLED_MODEL)
    checkpoint = open_checkpoint(BUNDLED_MODEL, spec, config)
    found = compute_types(spec, config, checkpoint, device=device, in_one_process=is_alone)
    return found.activations, found.cache


def test_a_small_model_is_computed_in_the_faster_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "float32_is_faster", lambda: True)
    assert types() == (F32, BF16)
    assert types(dtype="bfloat16") == (BF16, BF16)
    assert types(dtype="float32") == (F32, F32)
    assert types(CUDA) == types(is_alone=False) == types(quantization="int8") == (BF16, BF16)
    monkeypatch.setattr(settings, "float32_is_faster", lambda: False)
    assert types() == (BF16, BF16)


def test_a_large_model_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "float32_is_faster", lambda: True)
    assert fits_caches(read_spec(BUNDLED_MODEL))
    monkeypatch.setattr(settings, "_CACHED_WEIGHTS", 4_000_000)
    assert not fits_caches(read_spec(BUNDLED_MODEL))
    assert types() == (BF16, BF16)


def test_a_16_bit_cache_changes_the_logits_of_float32_little(
    monkeypatch: pytest.MonkeyPatch, driver: LoadDriver, prompt: MakePrompt
) -> None:
    monkeypatch.setattr(settings, "float32_is_faster", lambda: True)
    logits = []
    for dtype in ("auto", "float32"):
        engine = driver(BUNDLED_MODEL, dtype=dtype)
        assert engine.runner.model.dtype == F32
        assert engine.runner.model.kv_format.dtype == (BF16 if dtype == "auto" else F32)
        for slot, length in enumerate((5, 90)):
            engine.start(slot, prompt(length))
        logits.append(engine.logits({0: 5, 1: 90}))
    mixed, exact = logits
    assert mixed.dtype == F32
    assert (mixed - exact).norm() <= 0.01 * exact.norm()
    assert not torch.equal(mixed, exact)


@pytest.mark.parametrize("biased", [False, True])
def test_long_products_in_float32_are_closer_than_16_bits(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 640, generator=generator).to(BF16)
    bias = torch.randn(48, generator=generator).to(BF16) if biased else None
    try:
        product = PackedLinear(weight, bias, float32_rows=32)
    except RuntimeError:  # oneDNN has no 16-bit product here, so the engine uses another one
        assert not processor.has_16_bit_kernels()
        return
    for rows in (31, 32, 100):
        x = torch.randn(rows, 640, generator=generator).to(BF16)
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        result = product(x)
        assert result.dtype == BF16
        assert result.shape == exact.shape
        if rows >= 32:
            assert (
                torch.equal(result, exact.to(BF16))
                or ((result.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
            )


@pytest.mark.parametrize(
    ("cores", "engines", "is_small", "expected", "of_head"),
    [
        (2, 1, False, 2, 1),
        (2, 1, True, 1, 2),
        (2, 2, True, 1, 1),
        (8, 2, True, 3, 4),
        (16, 1, True, 15, 4),
        (1, 1, True, 1, 1),
    ],
)
def test_small_model_leaves_a_core_to_front_ends_except_for_its_head(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    engines: int,
    is_small: bool,
    expected: int,
    of_head: int,
) -> None:
    spec = read_spec(BUNDLED_MODEL)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("engine.executor.loading.fits_caches", lambda _: is_small)
    set_threads(EngineConfig(), engines)
    assert torch.get_num_threads() == expected
    assert max_head_threads(spec, EngineConfig(), engines) == of_head
    set_threads(EngineConfig(executor=ExecutorConfig(threads=2)), engines)
    assert torch.get_num_threads() == 2
    own = ExecutorConfig(threads=2)
    assert max_head_threads(spec, EngineConfig(executor=own), engines) == 1


def test_a_bound_process_has_a_thread_for_each_of_its_cores_within_the_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = read_spec(BUNDLED_MODEL)
    own = EngineConfig(executor=ExecutorConfig(cpu_bind="0-7|8-15"))
    chosen = EngineConfig(executor=ExecutorConfig(cpu_bind="0-7|8-15", threads=2))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("engine.executor.loading.usable_cores", lambda: 4)
    for config, quota, threads in (
        (own, None, 4),
        (own, 3.5, 3),
        (own, 0.5, 1),
        (chosen, None, 2),
    ):
        monkeypatch.setattr("engine.executor.environment.cpu_quota", lambda at=quota: at)
        set_threads(config, engines_on_node=2)
        assert torch.get_num_threads() == threads
        assert max_head_threads(spec, config, engines_on_node=2) == 1
