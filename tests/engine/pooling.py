"""Pooling engines in the test process, and their reference models."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from engine.core.engine_core import EngineCore
from engine.executor.encoding import EncoderExecutor
from engine.executor.in_process import InProcessExecutor
from engine.executor.team import Team
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.shared.config.model import ModelConfig
from engine.shared.messages import AddRequest, PoolingParams, RequestOutput, SamplingParams
from engine.shared.pooling import read_pooling

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
_ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {"max_position_embeddings": 256},
    "Roberta": {"max_position_embeddings": 258, "pad_token_id": 1, "type_vocab_size": 1},
    "XLMRoberta": {"max_position_embeddings": 258, "pad_token_id": 1, "type_vocab_size": 1},
    "ModernBert": {
        "max_position_embeddings": 256,
        "local_attention": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "Qwen3": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
ENCODERS = tuple(name for name in _ENCODERS if name != "Qwen3")


def save_pooling_model(family: str, directory: Path, kind: str = "Model", **settings: Any) -> Any:
    """Write a tiny random model, and return transformers' own."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = getattr(transformers, f"{family}Config")(**_SIZES, **_ENCODERS[family], **settings)
    model = getattr(transformers, family + kind)(config).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(1 + 0.1 * noise if "norm" in name.lower() else 0.2 * noise)
    model.save_pretrained(directory)
    return model


def prompts(count: int, longest: int = 150) -> list[list[int]]:
    """Return prompts of many lengths, some of them equal."""
    draw = random.Random(count)
    return [
        [
            draw.randrange(5, 256)
            for _ in range(draw.choice([1, 2, 7, 7, 30, draw.randint(3, longest)]))
        ]
        for _ in range(count)
    ]


def pooling_request(id: int, prompt: list[int], **params: Any) -> AddRequest:
    sampling = SamplingParams(max_tokens=1, seed=0)
    return AddRequest(id, str(id), 0, 0, prompt, sampling, pooling=PoolingParams(**params))


def outputs_of(
    directory: Path,
    requests: Sequence[AddRequest],
    *,
    model: dict[str, Any] | None = None,
    batch_invariant: bool = False,
    processes: int = 1,
    **scheduling: Any,
) -> dict[int, RequestOutput]:
    """Run requests in one engine with a small budget; return the only output of each."""
    settings = ModelConfig(model=str(directory), **(model or {}))
    config = EngineConfig(
        model=settings,
        cache=CacheConfig(num_kv_blocks=200, block_size=8),
        scheduler=SchedulerConfig(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 200} | scheduling
        ),
        executor=ExecutorConfig(threads=1, batch_invariant=batch_invariant),
        parallel=ParallelConfig(tensor_parallel_size=processes, data_parallel_size=1),
    )
    pooling = read_pooling(directory, settings)
    assert pooling is not None
    executor: Any
    if pooling.is_encoder:
        executor = EncoderExecutor(config, pooling)
    elif processes > 1:
        executor = InProcessExecutor(config, team=Team(config, 0, 1))
    else:
        executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    for request in requests:
        core.handle(request)
    found: dict[int, RequestOutput] = {}
    while core.has_work:
        for output in core.step().outputs.get(0, []):
            assert output.id not in found
            found[output.id] = output
    executor.shutdown()
    return found


def vectors_of(
    directory: Path, token_ids: list[list[int]], **settings: Any
) -> list[npt.NDArray[np.float32]]:
    """Return one vector of each prompt."""
    requests = [pooling_request(i + 1, ids) for i, ids in enumerate(token_ids)]
    found = outputs_of(directory, requests, **settings)
    return [vector(found[i + 1]) for i in range(len(token_ids))]


def vector(output: RequestOutput) -> npt.NDArray[np.float32]:
    assert output.pooled is not None, output.error
    return np.frombuffer(output.pooled, np.float32)
