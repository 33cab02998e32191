"""Settings that do not apply to pooling models."""

import pytest

from engine.executor.rules import check_pooling
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.shared.config.lora import LoraConfig
from engine.shared.pooling import BadPooling, PoolingSpec

ENCODER = PoolingSpec(task="embed", pooling="mean", size=8, is_encoder=True)
DECODER = PoolingSpec(task="embed", pooling="last", size=8)


def test_invalid_pooling_combinations_are_refused_by_name() -> None:
    cases = {
        "--speculative-ngram": (
            DECODER,
            EngineConfig(scheduler=SchedulerConfig(speculative_ngram=2)),
        ),
        "--speculative-model": (
            DECODER,
            EngineConfig(scheduler=SchedulerConfig(speculative_model="draft")),
        ),
        "--enable-expert-parallel": (
            DECODER,
            EngineConfig(parallel=ParallelConfig(enable_expert_parallel=True)),
        ),
        "--enable-lora": (DECODER, EngineConfig(lora=LoraConfig(enable_lora=True))),
        "--pipeline-parallel-size": (
            DECODER,
            EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=2)),
        ),
        "--tensor-parallel-size": (
            ENCODER,
            EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2)),
        ),
        "--model-impl": (DECODER, EngineConfig(model=ModelConfig(model_impl="transformers"))),
        "--kv-cache-dtype": (ENCODER, EngineConfig(cache=CacheConfig(kv_cache_dtype="fp8"))),
        "--quantization": (ENCODER, EngineConfig(model=ModelConfig(quantization="int8"))),
    }
    for flag, (spec, config) in cases.items():
        with pytest.raises(BadPooling, match=flag):
            check_pooling(config, spec)


def test_pooling_decoder_can_be_sharded_and_quantized() -> None:
    check_pooling(
        EngineConfig(
            parallel=ParallelConfig(tensor_parallel_size=2), model=ModelConfig(quantization="int8")
        ),
        DECODER,
    )
