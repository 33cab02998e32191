"""Trains a policy while it is served: REINFORCE on the bundled model.

Engines sample completions over HTTP. The reward is the fraction of tokens that are shouted, i.e.
have no lower-case letters. This process updates the weights along the policy gradient and sends
them to the engines, which keep serving: later completions come from the new policy, as reported in
`X-Weight-Version`. The difference between the engines' log probabilities and this process's is
printed, too: it is close to zero if the weights are the same.

    python -m benchmarks.policy_gradient
    python -m benchmarks.policy_gradient --steps 40 --engines 1 --plot /tmp/rewards.png
"""

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.running_stack import RunningStack
from engine.shared.config.model import BUNDLED_MODEL
from engine.shared.writable import writable_file
from swell.trainer import WeightSender

PROMPTS = (
    "To be, or not to be", "Now is the winter", "ROMEO:\n", "O, she doth teach", "What news",
    "KING HENRY:\n", "Friends, Romans", "My lord, I",
)  # fmt: skip
CHOICES = 8
"""Completions per prompt and step."""
TOKENS = 24
KEY = "trainer"


class Sample(NamedTuple):
    """One completion."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    """Of the tokens, as reported by the engine."""
    version: str
    """Version of the weights that computed it."""


class Step(NamedTuple):
    """Results of a step."""

    step: int
    weight_version: str
    reward: float
    """Mean over the completions, 0 to 1."""
    logprob_error: float
    """Mean distance between the engines' log probabilities and the trainer's."""
    sample_seconds: float
    train_seconds: float
    send_seconds: float


def sample(url: str, prompt: str, seed: int) -> list[Sample]:
    """Return completions of a prompt, sampled from the policy."""
    body = {
        "model": "swell-shakespeare", "prompt": prompt, "n": CHOICES, "max_tokens": TOKENS,
        "temperature": 1.0, "top_p": 1.0, "ignore_eos": True, "seed": seed, "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        version = answer.headers["X-Weight-Version"] or ""
        choices: list[dict[str, Any]] = json.load(answer)["choices"]
    return [
        Sample(
            each["prompt_token_ids"], each["token_ids"], each["logprobs"]["token_logprobs"], version
        )
        for each in choices
    ]


class Trainer:
    """The policy in training, in float32."""

    def __init__(self, rate: float) -> None:
        # Only this example requires the package.
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # engines need the other cores
        self._model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, weight_decay=0.0)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with their names in the checkpoint, with separate experts."""
        for name, weight in self._model.named_parameters():
            layer, _, kind = name.partition(".experts.")
            if not kind:
                yield name, weight
                continue
            for number, expert in enumerate(weight):
                at = f"{layer}.experts.{number}."
                if kind == "down_proj":
                    yield f"{at}down_proj.weight", expert
                else:
                    gate, up = expert.chunk(2)
                    yield f"{at}gate_proj.weight", gate
                    yield f"{at}up_proj.weight", up

    def learn(self, samples: Sequence[Sample], gains: Tensor) -> float:
        """Raise token probabilities in proportion to their gains [samples, tokens].

        Returns the mean difference between the samples' log probabilities and the local ones.
        """
        longest = max(len(each.prompt) for each in samples)
        width = longest + TOKENS
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        mask = torch.zeros(len(samples), width, dtype=torch.long)
        for row, each in enumerate(samples):  # tokens of all samples end in the same column
            whole = each.prompt + each.tokens
            ids[row, width - len(whole) :] = torch.tensor(whole)
            mask[row, width - len(whole) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._model(
            ids, attention_mask=mask, position_ids=positions, logits_to_keep=TOKENS + 1
        ).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, -TOKENS:, None])[..., 0]
        self._optimizer.zero_grad()
        (-(gains * logprobs).sum(1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        served = torch.tensor([each.logprobs for each in samples])
        return float((served - logprobs.detach()).abs().mean())


def gains_of(rewards: Tensor) -> Tensor:
    """Return each token's [samples, tokens] reward to go, relative to the mean over samples."""
    to_come = rewards.flip(1).cumsum(1).flip(1)
    against = to_come - to_come.mean(0)
    return against / (against.std() + 1e-6) / rewards.shape[1]


def train(url: str, steps: int, rate: float) -> Iterator[Step]:
    """Yield steps as they complete.

    Raises:
        AssertionError: engines answered with other weights than those sent last.
    """
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    texts = (tokenizer.decode([id]) for id in range(tokenizer.get_vocab_size()))
    shouted = torch.tensor([any(map(str.isupper, text)) and text == text.upper() for text in texts])
    trainer = Trainer(rate)
    with WeightSender(url, KEY) as sender, ThreadPoolExecutor(len(PROMPTS)) as clients:
        expected = ""
        for step in range(steps + 1):
            started_at = time.monotonic()
            seeds = range(step * len(PROMPTS), (step + 1) * len(PROMPTS))
            drawn = clients.map(sample, [url] * len(PROMPTS), PROMPTS, seeds)
            samples = [each for answer in drawn for each in answer]
            assert {each.version for each in samples} == {expected}, "the newest policy is served"
            rewards = shouted[torch.tensor([each.tokens for each in samples])].float()
            sampled = time.monotonic()
            error = trainer.learn(samples, gains_of(rewards))
            learnt = time.monotonic()
            version, expected = expected, f"step-{step + 1}"
            sender.send(dict(trainer.weights()), expected)
            yield Step(
                step, version or "(checkpoint)", float(rewards.mean()), error,
                sampled - started_at, learnt - sampled, time.monotonic() - learnt,
            )  # fmt: skip


def main() -> int:
    """Train; return 0 if the reward has risen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=24, help="updates of the weights")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--plot", type=Path, default=Path("build/rewards.png"))
    options = parser.parse_args()
    writable_file(options.plot)
    torch.manual_seed(1)
    done: list[Step] = []
    flags = ("--admin-key", KEY, "--data-parallel-size", str(options.engines))
    with RunningStack(*flags, "--num-kv-blocks", "512") as stack:
        for each in train(stack.url, options.steps, options.rate):
            done.append(each)
            bar = "#" * round(50 * each.reward)
            print(
                f"{each.step:4} {each.weight_version:>12} reward {each.reward:.3f} "
                f"logprobs off by {each.logprob_error:.4f}, "
                f"{each.sample_seconds:.2f} + {each.train_seconds:.2f} + {each.send_seconds:.2f} s "
                f"|{bar}",
                flush=True,
            )
    fifth = max(1, len(done) // 5)
    first, last = (fmean(each.reward for each in part) for part in (done[:fifth], done[-fifth:]))
    print(f"mean reward of the first {fifth} steps {first:.3f}, of the last {last:.3f}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("the extra `plot` is not installed: no plot")
    else:
        figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
        axes = figure.subplots()
        axes.plot([each.reward for each in done])
        axes.set(xlabel="updates of the served weights", ylabel="mean reward", ylim=(0, 1))
        figure.savefig(options.plot)
        print(options.plot)
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
