"""Settings that a model which makes vectors instead of tokens does not work with."""

from engine.shared.config import EngineConfig
from engine.shared.pooling import BadPooling, PoolingSpec


def check_pooling(config: EngineConfig, pooling: PoolingSpec) -> None:
    """Refuse such settings at the start.

    Raises:
        BadPooling: naming the setting to change.
    """
    parallel = config.parallel
    refused = {
        "--speculative-ngram proposes tokens, and this model generates none": (
            config.scheduler.speculative_ngram > 0
        ),
        "--speculative-model proposes tokens, and this model generates none": (
            config.scheduler.speculative_model is not None
        ),
        "--speculative-method proposes tokens, and this model generates none": (
            config.scheduler.speculative_method != "auto"
        ),
        "--enable-expert-parallel is for models that generate": parallel.enable_expert_parallel,
        "--pipeline-parallel-size is for models that generate: leave it at 1": (
            parallel.pipeline_parallel_size > 1
        ),
        "--model-impl transformers is for models that generate": (
            config.model.model_impl == "transformers"
        ),
        "--enable-lora is for models that generate": config.lora.enable_lora,
    }
    if pooling.is_encoder:
        refused |= {
            "an encoder is computed by one process: leave --tensor-parallel-size and "
            "--pipeline-parallel-size at 1": parallel.processes > 1,
            "an encoder keeps no keys and values: leave out --kv-cache-dtype": (
                config.cache.kv_cache_dtype != "auto"
            ),
            "an encoder is computed with the weights as stored: leave out --quantization": (
                config.model.quantization is not None
            ),
        }
    reasons = [reason for reason, asked in refused.items() if asked]
    if reasons:
        raise BadPooling(f"this model makes vectors (--runner pooling): {'; '.join(reasons)}")
