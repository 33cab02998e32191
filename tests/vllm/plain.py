"""Run in vLLM's environment: what plain vLLM generates, as JSON lines.

Reads a JSON object from standard input: `model`, `arguments` of `LLM`, and `requests`, each with
`prompt` (token ids) and the keyword arguments of `SamplingParams` or a JSON schema as `schema`.
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main() -> None:
    """Generate, and print one object per request."""
    wanted = json.load(sys.stdin)
    llm = LLM(wanted["model"], **wanted["arguments"])
    sampling = []
    for each in wanted["requests"]:
        schema = each.get("schema")
        grammar = None if schema is None else StructuredOutputsParams(json=schema)
        sampling.append(SamplingParams(**each["sampling"], structured_outputs=grammar))
    prompts = [{"prompt_token_ids": each["prompt"]} for each in wanted["requests"]]
    with open(sys.argv[1], "w") as file:
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            first = output.outputs[0]
            answer: dict[str, Any] = {"text": first.text, "token_ids": list(first.token_ids)}
            if first.logprobs is not None:
                answer["logprobs"] = [
                    [step[token].logprob, sorted(each.logprob for each in step.values())]
                    for step, token in zip(first.logprobs, first.token_ids, strict=True)
                ]
            file.write(json.dumps({**answer, "finish_reason": first.finish_reason}) + "\n")


if __name__ == "__main__":
    main()
