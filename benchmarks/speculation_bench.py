"""Compares ways to draft tokens, and numbers of them, in turn within the same minute.

python -m benchmarks.speculation_bench [MODEL] --ngram-tokens 0 4 8 --streams 1 16
python -m benchmarks.speculation_bench model.gguf --ngram-tokens 0 --drafts DIRECTORY --texts chat

One engine in this process for each way: n-grams (`--ngram-tokens`, 0 for none) and draft models or
heads (`--drafts`, for each number in `--draft-tokens`; `benchmarks.cut_model` and
`benchmarks.train_draft` make some; `--copies` are the model itself in few bits). "repetitive"
continues a text that repeats itself, greedily; "plain" draws at temperature 1 from a text that does
not; "chat" answers questions greedily and "drawn chat" at temperature 1, which needs a model that
can: eight or more of them, as many at once as there are streams. Every row should give the same
tokens; batches of another size may round a tie the other way.

Drafts are skipped where they are not expected to pay; `--row-price 0` makes all of them. "skipped"
is the share of the drafts that could have been made and were not.

"CPU ms" is processor time of all threads per output token: unlike the rate, it says something on
a machine that does other work too. "by place" is how many of all drafts had their first, second,
... token accepted.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from engine.core.engine_core import EngineCore
from engine.executor.environment import settle_environment
from engine.shared.config import (
    BUNDLED_MODEL,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AddRequest, SamplingParams
from engine.shared.model_files import model_directory


class Run(NamedTuple):
    """One round of one setting."""

    rate: float
    """Output tokens per second."""
    per_row: float
    """Output tokens per row computed: one, and the draft tokens that were accepted."""
    cpu: float
    """Processor time of all threads per output token, in milliseconds."""
    skipped: float
    """Share of the possible drafts that were not made."""
    accepted: float
    """Share of the draft tokens that were accepted."""
    by_place: list[float]
    """Share of the drafts whose first token was accepted, whose second was, and so on."""
    outputs: dict[int, list[int]]


class Setting(NamedTuple):
    """One way to draft tokens."""

    ngram: int = 0
    draft: str | None = None
    """Directory of a draft model."""
    draft_tokens: int = 1
    quantization: Literal["int8", "int4"] | None = None
    """Of the draft model."""

    @property
    def name(self) -> str:
        """What its rows are called."""
        if self.draft is None:
            return str(self.ngram)
        return f"{self.quantization or Path(self.draft).name}:{self.draft_tokens}"


class Engine:
    """One engine with one way to draft tokens."""

    def __init__(self, options: argparse.Namespace, setting: Setting) -> None:
        from engine.executor.in_process import InProcessExecutor  # imports torch

        config = EngineConfig(
            model=ModelConfig(
                model=options.model,
                load_format=options.load_format,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
            ),
            cache=CacheConfig(
                enable_prefix_caching=False, kv_cache_memory_bytes=options.cache_mib << 20
            ),
            scheduler=SchedulerConfig(
                speculative_ngram=setting.ngram,
                speculative_model=setting.draft,
                num_speculative_tokens=setting.draft_tokens,
                speculative_model_quantization=setting.quantization,
                speculative_row_price=options.row_price,
                prompt_lookup_min=options.lookup_min,
                prompt_lookup_max=options.lookup_max,
            ),
        )
        self.core = EngineCore(config, InProcessExecutor(config), rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)

    def run(self, batches: list[list[list[int]]], tokens: int, temperature: float) -> Run:
        """Continue every prompt by so many tokens, one batch of them after the other."""
        outputs: dict[int, list[int]] = {}
        before = self.core.stats().counters.snapshot()
        began, cpu = time.perf_counter(), time.process_time()
        for prompts in batches:
            outputs |= self._continue(prompts, len(outputs), tokens, temperature)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        after = self.core.stats().counters
        drafts = max(1, after.spec_drafts - before.spec_drafts)
        drafted = after.spec_draft_tokens - before.spec_draft_tokens
        right = after.spec_accepted_tokens - before.spec_accepted_tokens
        places = itertools.zip_longest(after.spec_accepted_at, before.spec_accepted_at, fillvalue=0)
        total, skipped = len(outputs) * tokens, after.spec_skipped - before.spec_skipped
        return Run(
            rate=total / seconds,
            per_row=total / (total - right),
            cpu=1000 * cpu / total,
            skipped=skipped / max(1, skipped + after.spec_drafts - before.spec_drafts),
            accepted=right / max(1, drafted),
            by_place=[(late - early) / drafts for late, early in places],
            outputs=outputs,
        )

    def _continue(
        self, prompts: list[list[int]], first: int, tokens: int, temperature: float
    ) -> dict[int, list[int]]:
        """Return what was written for each of some prompts, which are numbered from `first` on."""
        outputs: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts, first):
            sampling = SamplingParams(
                max_tokens=tokens, seed=number, temperature=temperature, ignore_eos=True
            )
            self.core.handle(AddRequest(number, str(number), 0, 0, prompt, sampling))
            outputs[number] = []
        while self.core.has_work:
            for output in self.core.step().outputs.get(0, []):
                outputs[output.id] += output.token_ids
        return outputs


CHATS = ("chat", "drawn chat")
DRAWN = ("plain", "drawn chat")
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a dog who finds a lost key.",
    "Give me a recipe for pancakes with a list of ingredients.",
    "What is the difference between a list and a tuple in Python?",
    "Summarize how photosynthesis works for a ten-year-old.",
    "Write a polite email that asks for a day off next Friday.",
    "Name five animals that live in the ocean and one fact about each.",
)


def chats(model: str, streams: int) -> list[list[list[int]]]:
    """Return batches of questions in the form of ChatML, each of one for each stream."""
    directory = model_directory(ModelConfig(model=model), weights=False)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    count = -(-len(QUESTIONS) // streams) * streams
    asked = [
        form.format(question) for question in itertools.islice(itertools.cycle(QUESTIONS), count)
    ]
    encoded = [tokenizer.encode(each).ids for each in asked]
    return [encoded[first : first + streams] for first in range(0, count, streams)]


def prompts(kind: str, streams: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts; repetitive ones say the same 30 tokens again and again."""
    source = random.Random(streams)
    size = 30 if kind == "repetitive" else length
    texts = [[source.randrange(vocab_size) for _ in range(size)] for _ in range(streams)]
    return [(text * (length // size + 1))[:length] for text in texts]


def measure(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the cells of one row per kind of text, number of streams and setting."""
    settings = [Setting(count) for count in options.ngram_tokens]
    settings += [
        Setting(0, *draft) for draft in itertools.product(options.drafts, options.draft_tokens)
    ]
    settings += [
        Setting(0, options.model, count, quantization)
        for quantization, count in itertools.product(options.copies, options.draft_tokens)
    ]
    engines = {setting: Engine(options, setting) for setting in settings}
    vocab_size = engines[settings[0]].core.operations.vocab_size
    for kind, streams in itertools.product(options.texts, options.streams):
        if kind in CHATS:
            texts = chats(options.model, streams)
        else:
            texts = [prompts(kind, streams, options.prompt, vocab_size)]
        temperature = 1.0 if kind in DRAWN else 0.0
        runs: dict[Setting, list[Run]] = {setting: [] for setting in settings}
        for number in range(options.rounds + 1):
            for setting in settings[:: 1 if number % 2 else -1]:
                asked = texts if number else texts[:1]  # the first round warms up
                run = engines[setting].run(asked, options.tokens, temperature)
                if number:
                    runs[setting].append(run)
        base = statistics.median(run.rate for run in runs[settings[0]])
        expected = runs[settings[0]][0].outputs
        for setting, of_setting in runs.items():
            rate = statistics.median(run.rate for run in of_setting)
            last = of_setting[-1]
            same = sum(last.outputs[number] == expected[number] for number in expected)
            by_place = " ".join(f"{share:.0%}" for share in last.by_place)
            cpu = statistics.median(run.cpu for run in of_setting)
            yield (
                kind, str(streams), setting.name, f"{rate:.1f}", f"{rate / base:.2f}",
                f"{cpu:.1f}", f"{last.per_row:.2f}", f"{last.skipped:.0%}", f"{last.accepted:.0%}",
                by_place,
                f"{same}/{len(expected)}",
            )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(BUNDLED_MODEL))
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ngram-tokens", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument(
        "--drafts", nargs="+", default=[], help="directories of draft models or heads"
    )
    parser.add_argument("--copies", nargs="+", default=[], help="int8, int4: copies of the model")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--texts", nargs="+", default=["repetitive", "plain"])
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--cache-mib", type=int, default=256)
    parser.add_argument("--lookup-min", type=int)
    parser.add_argument("--lookup-max", type=int)
    parser.add_argument("--row-price", type=float, help="of --speculative-row-price")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    settle_environment()
    widths = (10, 7, 12, 12, 5, 7, 12, 7, 8, 20, 11)
    head = ("text", "streams", "drafts", "output tok/s", "ratio", "CPU ms", "tokens / row",
            "skipped", "accepted", "by place", "same tokens")  # fmt: skip
    for cells in itertools.chain([head], measure(parser.parse_args())):
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print(line, flush=True)


if __name__ == "__main__":
    main()
