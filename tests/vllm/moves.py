"""Run in vLLM's environment: what a vLLM engine makes of sequences that were begun elsewhere.

Reads from standard input `model`, `engine_args`, a `prompt`, `tokens` to generate, `places` up to
which they were generated elsewhere, and a `schema`. Writes to the file that is named, as JSON: the
outputs of each case, whole and gone on with, and what vLLM's second model runner is told.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from engine.core.events import FrontEndJoined
from engine.core.wave_clock import WaveClock
from engine.shared.config import EngineConfig, ExecutorConfig, ModelConfig
from engine.shared.messages import AddRequest, JsonSchemaGrammar, SamplingParams
from engine.vllm.core import VllmCore
from engine.vllm.requests import Continuation

ids = itertools.count(1)


def queue(core: VllmCore, prompt: list[int], output: list[int], fields: dict[str, Any]) -> int:
    """Queue a request; return its id."""
    sampling = SamplingParams(seed=1, temperature=0.0, **fields)
    message = AddRequest(next(ids), "test", 0, 0, prompt, sampling, output)
    core.handle(message)
    return message.id


def generated(core: VllmCore, prompt: list[int], output: list[int], **fields: Any) -> list[int]:
    """Return all of the output, with what it had before."""
    request_id, tokens = queue(core, prompt, output, fields), list(output)
    while True:
        for each in itertools.chain.from_iterable(core.step().outputs.values()):
            assert each.id == request_id
            assert each.finish_reason != "error", each.error
            tokens += each.token_ids
            if each.finish_reason is not None:
                return tokens


def main() -> None:
    """Generate, one request after the other, so that all batches are the same."""
    wanted = json.load(sys.stdin)
    prompt = wanted["prompt"]
    config = EngineConfig(
        model=ModelConfig(model=wanted["model"], max_model_len=512, dtype="float32"),
        executor=ExecutorConfig(
            engine_backend="vllm", enforce_eager=True, engine_args=wanted["engine_args"]
        ),
    )
    core = VllmCore(config, rank=0, incarnation=1, clock=WaveClock(0), on_failure=sys.exit)
    core.handle(FrontEndJoined(0, 1))
    limit = {"max_tokens": wanted["tokens"]}
    plain = generated(core, prompt, [], **limit)
    cases: dict[str, dict[str, Any]] = {
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 0.7},
        "penalties": {
            "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3,
        },
        "bad_words": {"bad_words": (tuple(plain[20:22]), tuple(plain[30:33]))},
        "min_tokens": {"min_tokens": 40, "stop_token_ids": (plain[10],)},
        "grammar": {"grammar": JsonSchemaGrammar(json.dumps(wanted["schema"]))},
        "grammar after text": {
            "grammar": JsonSchemaGrammar(json.dumps(wanted["schema"])), "grammar_after": "</it>",
            "grammar_budget": 10,
        },
    }  # fmt: skip
    answers: dict[str, Any] = {}
    for name, fields in {"plain": {}, **cases}.items():
        whole = generated(core, prompt, [], **limit, **fields)
        earlier = [whole[:place] for place in wanted["places"] if place < len(whole)]
        answers[name] = [whole]
        answers[name] += [generated(core, prompt, each, **limit, **fields) for each in earlier]
    # It needs Triton, so that here nothing is computed with it.
    core._continuation, core._core.scheduler.use_v2_model_runner = Continuation.RESUMED, True
    request_id = queue(core, prompt, plain[:40], {**limit, **cases["penalties"]})
    (told,) = core._core.scheduler.schedule().scheduled_new_reqs
    assert told.req_id == str(request_id)
    params = told.sampling_params
    answers["told"] = {
        "prompt": told.prompt_token_ids, "output": told.prefill_token_ids[len(prompt) :],
        "max_tokens": params.max_tokens, "presence_penalty": params.presence_penalty,
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(answers))
    core.shutdown()


if __name__ == "__main__":
    main()
