"""Engines are batch-invariant as configured, by default where it is possible and cheap."""

import logging
from typing import Any

import msgspec
import pytest
import torch

from engine.models.hf_config import read_spec
from engine.models.loading import invariance
from engine.models.loading.invariance import has_invariant_kernels, is_batch_invariant
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec
from engine.shared.config import (
    BUNDLED_MODEL,
    EngineConfig,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
)
from engine.shared.group_config import group_config

CPU = torch.device("cpu")
FLOAT32 = ComputeTypes(torch.float32, torch.bfloat16)
BFLOAT16 = ComputeTypes(torch.bfloat16, torch.bfloat16)
MORE_COSTLY = [
    EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2)),
    EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=2)),
    EngineConfig(parallel=ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)),
    EngineConfig(lora=LoraConfig(enable_lora=True)),
    EngineConfig(model=ModelConfig(quantization="int8")),
]


def chosen(
    config: EngineConfig | None = None,
    *,
    spec: ModelSpec | None = None,
    types: ComputeTypes = FLOAT32,
    device: torch.device = CPU,
) -> bool:
    plain = read_spec(BUNDLED_MODEL)
    config = config or EngineConfig()
    return is_batch_invariant(
        config,
        spec or plain,
        types,
        device,
        kernels=None,
        is_quantized=config.model.quantization is not None,
    )


@pytest.fixture(params=[True, False], autouse=True)
def is_cheap(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(invariance, "is_invariance_cheap", lambda: request.param)
    result: bool = request.param
    return result


def test_the_processor_decides_by_default(is_cheap: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen() is is_cheap
    [record] = caplog.records
    assert record.getMessage().startswith("batch-invariant" if is_cheap else "not batch-invariant")


@pytest.mark.parametrize("value", [True, False])
def test_explicit_setting_decides_without_log(
    value: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(EngineConfig(executor=ExecutorConfig(batch_invariant=value))) is value
    assert not caplog.records


@pytest.mark.parametrize("config", MORE_COSTLY)
def test_costly_or_unsupported_batch_invariance_is_off(config: EngineConfig) -> None:
    assert chosen(config) is False


def test_batch_invariance_is_off_for_costly_model(caplog: pytest.LogCaptureFixture) -> None:
    spec = read_spec(BUNDLED_MODEL)
    sliding = msgspec.structs.replace(spec, windows=(16,) * len(spec.windows))
    assert chosen(spec=sliding) is False
    assert chosen(spec=msgspec.structs.replace(spec, attention_softcap=50.0)) is False
    assert chosen(types=BFLOAT16) is False
    assert chosen(types=FLOAT32._replace(kv_cache_dtype="fp8")) is False
    assert chosen(device=torch.device("cuda")) is False


@pytest.mark.parametrize(("has_kernels", "is_free"), [(True, True), (True, False), (False, True)])
def test_kernels_that_compute_row_by_row_make_it_the_default_where_nothing_is_faster(
    has_kernels: bool, is_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariance, "has_invariant_kernels", lambda _spec, _: has_kernels)
    monkeypatch.setattr(invariance, "is_invariance_free", lambda: is_free)
    by_kernels = has_kernels and is_free
    replace = msgspec.structs.replace
    with_experts = read_spec(BUNDLED_MODEL)
    plain = replace(with_experts, moe=None)
    assert chosen(types=BFLOAT16, spec=plain) is by_kernels
    assert chosen(types=BFLOAT16, spec=replace(plain, windows=(16,))) is by_kernels
    assert chosen(types=BFLOAT16, spec=replace(plain, attention_softcap=50.0)) is by_kernels
    assert chosen(types=BFLOAT16, spec=with_experts) is by_kernels
    assert chosen(types=BFLOAT16._replace(kv_cache_dtype="fp8"), spec=plain) is False
    assert not any(chosen(config, types=BFLOAT16, spec=plain) for config in MORE_COSTLY)


@pytest.mark.parametrize("lacks", ["kernels", "products", "attention", "nothing"])
def test_invariance_needs_kernels_for_products_and_attention(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: Any = object()
    monkeypatch.setattr(invariance, "has_product_kernel", lambda: lacks != "products")
    monkeypatch.setattr(invariance, "has_patch_attention", lambda _spec: lacks != "attention")
    kernels = None if lacks == "kernels" else there
    assert has_invariant_kernels(read_spec(BUNDLED_MODEL), kernels) is (lacks == "nothing")


def test_engines_compare_configured_invariance() -> None:
    configs = [
        group_config(EngineConfig(executor=ExecutorConfig(batch_invariant=value)))
        for value in (None, True, False)
    ]
    assert [each["batch_invariant"] for each in configs] == ["auto", "True", "False"]
