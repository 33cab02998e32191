"""Offline throughput of the library: all prompts at once, against another library.

    python -m benchmarks.offline_bench swell /tmp/models/0.4b
    python -m benchmarks.offline_bench transformers /tmp/models/0.4b --batch 64
    ~/peer/.venv/bin/python benchmarks/offline_bench.py vllm /tmp/models/0.4b

Each library gets the same prompts of random token ids and generates `--max-tokens` greedily for
each. Loading is not counted. Libraries are imported only when measured, so this runs in their
environments.
"""

import argparse
import random
import time
from typing import Any


def swell(model: str, prompts: list[list[int]], max_tokens: int, _batch: int) -> tuple[float, int]:
    """Return the seconds, and the number of tokens generated."""
    from swell import LLM

    with LLM(model, max_model_len=1024) as llm:
        llm.generate(prompts[:2], max_tokens=2, temperature=0, ignore_eos=True)
        started_at = time.monotonic()
        answers = llm.generate(prompts, max_tokens=max_tokens, temperature=0, ignore_eos=True)
        seconds = time.monotonic() - started_at
    return seconds, sum(each.usage.completion_tokens if each.usage else 0 for each in answers)


def transformers(
    model: str, prompts: list[list[int]], max_tokens: int, batch: int
) -> tuple[float, int]:
    """Return the same for transformers, in batches of equal length."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    count, longest = 0, max(map(len, prompts))
    started_at = time.monotonic()
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        ids = torch.tensor([[0] * (longest - len(each)) + each for each in part])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in part])
        found = loaded.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0,
            max_new_tokens=max_tokens, min_new_tokens=max_tokens,
        )  # fmt: skip
        count += (found.shape[1] - longest) * len(part)
    return time.monotonic() - started_at, count


def vllm(model: str, prompts: list[list[int]], max_tokens: int, _batch: int) -> tuple[float, int]:
    """Return the same for vLLM."""
    from vllm import LLM, SamplingParams

    llm: Any = LLM(model, max_model_len=1024, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": each} for each in prompts]
    llm.generate(inputs[:2], params)
    started_at = time.monotonic()
    answers = llm.generate(inputs, params)
    seconds = time.monotonic() - started_at
    return seconds, sum(len(each.outputs[0].token_ids) for each in answers)


LIBRARIES = {"swell": swell, "transformers": transformers, "vllm": vllm}


def main() -> None:
    """Measure one library and print a line."""
    parser = argparse.ArgumentParser(description="Offline throughput of a library.")
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64, help="of transformers")
    args = parser.parse_args()
    drawn = random.Random(1)
    prompts = [
        [drawn.randrange(1000, 30_000) for _ in range(drawn.randrange(32, 97))]
        for _ in range(args.prompts)
    ]
    seconds, tokens = LIBRARIES[args.library](args.model, prompts, args.max_tokens, args.batch)
    rate = tokens / seconds
    print(
        f"{args.library}: {args.prompts} prompts, {sum(map(len, prompts))} tokens in, {tokens} out,"
        f" {seconds:.1f} s, {rate:.1f} tokens/s"
    )


if __name__ == "__main__":
    main()
