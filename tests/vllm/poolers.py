"""Run in vLLM's environment: vectors of a pooling model by a vLLM engine.

Reads a list of prompts, each with the fields of `PoolingParams`, from standard input. Writes to the
file that is named, as JSON, the vector of each, or the name of the parameter that is refused.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.events import FrontEndJoined
from engine.core.wave_clock import WaveClock
from engine.shared.config import EngineConfig, ExecutorConfig, ModelConfig
from engine.shared.messages import AddRequest, PoolingParams, SamplingParams
from engine.vllm.core import VllmCore


def main() -> None:
    model, results = sys.argv[1:]
    config = EngineConfig(
        model=ModelConfig(model=model, dtype="float32", max_model_len=128),
        executor=ExecutorConfig(
            engine_backend="vllm", enforce_eager=True, engine_args="skip_tokenizer_init: true"
        ),
    )
    core = VllmCore(config, rank=0, incarnation=1, clock=WaveClock(0), on_failure=sys.exit)
    core.handle(FrontEndJoined(0, 1))
    sampling, requests = SamplingParams(max_tokens=1, seed=0), json.load(sys.stdin)
    for number, (prompt, fields) in enumerate(requests):
        pooling = PoolingParams(**fields)
        core.handle(AddRequest(number, "test", 0, 0, prompt, sampling, pooling=pooling))
    found: dict[int, Any] = {}
    while len(found) < len(requests):
        for each in itertools.chain.from_iterable(core.step().outputs.values()):
            assert each.finish_reason == "stop" or each.refused, each
            vector = None if each.pooled is None else np.frombuffer(each.pooled, np.float32)
            found[each.id] = each.error_param if vector is None else vector.tolist()
    Path(results).write_text(json.dumps([found[number] for number in range(len(requests))]))
    core.shutdown()


if __name__ == "__main__":
    main()
