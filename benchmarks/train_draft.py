"""Trains an EAGLE-3 draft head for a chat model of Llama's form, on what the model itself answers.

python -m benchmarks.train_draft SmolLM2-135M-Instruct.Q4_1.gguf head --answers answers
python -m server serve SmolLM2-135M-Instruct.Q4_1.gguf --speculative-model head

First the model answers questions, half of them greedily, and its states are kept in `--answers`
(4.6 kB for each token of SmolLM2; answers that are there already are used, none are made then).
Then the head learns the model's distributions at every position, several drafted tokens deep. All
of it in float32 on the CPU: in a second of one core of an AMD EPYC (Zen 3) about 190 tokens are
written, or 500 learned from. What is printed is of answers that it does not learn from; with
`--start` the earlier head may have learned from some.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import Progress as Bar
from rich.progress import TextColumn
from tokenizers import Tokenizer

from benchmarks.draft_head.answers import Answered, Writer
from benchmarks.draft_head.module import (
    HeadModule,
    TargetWeights,
    first_weights,
    save_head,
    saved_weights,
)
from benchmarks.draft_head.prompts import Prompt, prompts
from benchmarks.draft_head.store import load_answers, save_answers
from benchmarks.draft_head.training import (
    Progress,
    Trainer,
    Vocabulary,
    batch_of,
    batches,
    frequent_tokens,
)
from engine.executor.environment import settle_environment
from engine.executor.loading import load_model
from engine.models.hf_config import read_spec
from engine.models.settings import open_checkpoint
from engine.shared.config import EngineConfig, ModelConfig
from engine.shared.model_files import model_directory

_SLOTS = 48
"""Prompts that are answered at once."""
_UNSEEN = 0.05
"""Share of the answers that the head does not learn from, to see what it has learned."""


def write_answers(
    options: argparse.Namespace, layers: tuple[int, ...], asked: Iterator[Prompt]
) -> None:
    """Have the model answer until there are enough tokens."""
    settings = ModelConfig(model=options.model, dtype="float32", max_model_len=options.longest)
    model = load_model(EngineConfig(model=settings), torch.device("cpu"), print).model
    writer = Writer(model, layers, slots=_SLOTS, longest=options.longest)

    def enough() -> Iterator[Answered]:
        with Bar(*Bar.get_default_columns()) as bar:
            task, count = bar.add_task("answers", total=options.tokens), 0
            for answered in writer.answer(asked, options.answer_tokens):
                yield answered
                count += len(answered.token_ids)
                bar.update(task, completed=count)
                if count >= options.tokens:
                    return

    save_answers(enough(), options.answers)


def train(options: argparse.Namespace, layers: tuple[int, ...]) -> Progress:
    """Train a head on the answers and write it; return what it makes of unseen ones."""
    settings = ModelConfig(model=options.model)
    directory = model_directory(settings, weights=True)
    spec = read_spec(directory)
    target = TargetWeights(open_checkpoint(directory, spec, settings), spec)
    answers = list(load_answers(options.answers))
    source = random.Random(options.seed)
    source.shuffle(answers)
    cut = max(1, int(_UNSEEN * len(answers)))
    unseen, answers = answers[:cut], answers[cut:]
    token_ids = frequent_tokens(answers, spec.vocab_size, options.vocabulary)
    lm_head = target.lm_head()[token_ids]
    longest = max(len(each.token_ids) for each in (*answers, *unseen))
    weights = saved_weights(options.start) if options.start else first_weights(target)
    head = HeadModule(spec, weights, longest=longest)
    plan = [
        batch for _ in range(options.epochs) for batch in batches(answers, options.batch, source)
    ][: options.updates]
    trainer = Trainer(
        head,
        target.embedding(),
        Vocabulary(token_ids, lm_head),
        steps=options.steps,
        updates=len(plan),
        rate=options.rate,
    )
    test = [batch_of(batch) for batch in batches(unseen, options.batch, source)]
    began = time.thread_time()
    with Bar(*Bar.get_default_columns(), TextColumn("{task.fields[found]}")) as bar:
        task = bar.add_task("training", total=len(plan), found="")
        for number, batch in enumerate(plan):
            if number % options.look_every == 0:
                bar.console.print(f"after {number} updates: {_said(trainer.look(test))}")
            bar.update(task, advance=1, found=_said(trainer.update(batch_of(batch))))
    found = trainer.look(test)
    print(f"in {time.thread_time() - began:.0f} s of processor time: {_said(found)}")
    save_head(
        options.head,
        head.weights,
        layers=layers,
        lm_head=lm_head,
        token_ids=token_ids,
        target=json.loads((directory / "config.json").read_text()),
    )
    return found


def _said(found: Progress) -> str:
    right = " ".join(f"{share:.0%}" for share in found.right)
    return f"loss {found.loss:.2f}, right {right}"


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("model", help="directory or GGUF file of the model that the head is for")
    add("head", type=Path, help="directory that the head is written to")
    add("--start", type=Path, help="directory of a head to go on from")
    add("--answers", type=Path, required=True, help="directory of what the model has answered")
    add("--tokens", type=int, default=250_000, help="prompts and answers together")
    add("--answer-tokens", type=int, default=140, help="of one answer at most")
    add("--longest", type=int, default=400, help="tokens of a prompt and its answer at most")
    add("--layers", type=int, nargs=3, help="after how many layers states are taken")
    add("--vocabulary", type=int, default=8192, help="tokens that the head can draft")
    add("--steps", type=int, default=2, help="tokens that it learns to draft one after the other")
    add("--epochs", type=int, default=6)
    add("--updates", type=int, help="at most, of all epochs together")
    add("--batch", type=int, default=400, help="tokens in one update")
    add("--rate", type=float, default=1.5e-3, help="learning rate")
    add("--look-every", type=int, default=100, help="updates between looks at unseen answers")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    return result


def main() -> None:
    """Write answers if there are none, and train."""
    options = parser().parse_args()
    settle_environment()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    directory = model_directory(ModelConfig(model=options.model), weights=True)
    count = read_spec(directory).num_layers
    layers = tuple(options.layers or (2, count // 2, count - 2))
    if not 1 < layers[0] < layers[1] < layers[2] < count:
        raise SystemExit(f"--layers {layers}: three, ascending, from 2 to {count - 1}")
    if not any(options.answers.glob("answers-*.safetensors")):
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        write_answers(options, layers, prompts(tokenizer, options.seed))
    train(options, layers)


if __name__ == "__main__":
    main()
