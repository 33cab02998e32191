"""What each way to store a model's weights costs: perplexity, memory, tokens per second.

python -m benchmarks.model_forms SmolLM2-135M-Instruct.Q4_1.gguf --llama-cpp ~/llama.cpp/build/bin

Three parts; `--parts` chooses some, and the cells of the others stay empty:

- greedy: 50 prompts in fp32, compared with transformers, which reads the GGUF file by itself;
- perplexity: of every form on one text, all computed in bf16; forms that are not at hand are
  written from the file's weights;
- speed: servers of every form in turn, so many rounds, two threads each, 1, 4 and 16 requests at
  once; with `--llama-cpp` (the directory of llama-server and llama-quantize) llama.cpp's server has
  turns with the GGUF files.

Prints one table in Markdown, and with `--output` writes it to that file as it fills. A short
try of everything: `--rounds 1 --tokens 8 --windows 1 --prompts 2`.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.forms.checks import TEXT, greedy_equal, perplexity
from benchmarks.forms.speed import ROWS, Visit, visit
from benchmarks.forms.stored import Form, forms
from benchmarks.side_by_side import this_processor
from benchmarks.versus.report import markdown
from engine.executor.environment import settle_environment

_PARTS = ("greedy", "perplexity", "speed")
_NOT_READ = "-"
"""In the columns of llama.cpp, beside forms that it does not read."""


class Measured(NamedTuple):
    """What was found of one form so far."""

    perplexity: list[float]
    """None yet, or one."""
    swell: list[Visit]
    llama_cpp: list[Visit]


class Comparison:
    """All forms of one model, and what was found of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._programs: Path | None = options.llama_cpp
        every = list(forms(options.model, options.directory, self._program("llama-quantize")))
        self._tokenizer = Tokenizer.from_file(str(every[0].path / "tokenizer.json"))
        self._forms = [each for each in every if _is_wanted(each, options.only)]
        self._found = {form.name: Measured([], [], []) for form in self._forms}
        self._notes = [f"{len(os.sched_getaffinity(0))} cores {this_processor().summary}"]

    def _program(self, name: str) -> Path | None:
        """Return llama.cpp's program, or None without `--llama-cpp`."""
        return None if self._programs is None else self._programs / name

    def greedy(self) -> None:
        """Compare greedy answers with those of transformers."""
        options = self._options
        count, same = greedy_equal(options.model, self._tokenizer, options.prompts, options.answer)
        self._notes.append(
            f"{same} of {count} greedy answers of {options.answer} tokens in fp32 equal those of "
            "transformers on the weights that it reads from the same GGUF file."
        )

    def perplexity(self) -> None:
        """Let every form predict the text."""
        for form in self._forms:
            found = perplexity(form, self._tokenizer, self._options.windows)
            self._found[form.name].perplexity.append(found.value)
            print(form.name, f"{found.value:.3f}", sep="\t", file=sys.stderr, flush=True)
            self.write()
        self._notes.append(
            f"Perplexity: of {found.num_tokens} tokens ({TEXT}), windows of 512, computed in bf16."
        )

    def speed(self) -> None:
        """Give the servers of all forms their turns, in the opposite order every other round."""
        server = self._program("llama-server")
        turns: list[tuple[Form, Path | None]] = []
        for form in self._forms:
            turns.append((form, None))
            if server is not None and _is_read_by_llama_cpp(form):
                turns.append((form, server))
        seed = time.time_ns() % 100_000
        for round_number in range(self._options.rounds):
            for form, program in turns[:: -1 if round_number % 2 else 1]:
                seed += 100
                found = visit(form, program, self._options.tokens, seed)
                side = self._found[form.name]
                (side.swell if program is None else side.llama_cpp).append(found)
                whose = "Swell" if program is None else "llama.cpp"
                print(whose, form.name, found, sep="\t", file=sys.stderr, flush=True)
                self.write()
        self._notes.append(
            f"MB: resident, all processes, with room for 16 requests. Tokens per second: of 1, 4 "
            f"and 16 requests at once with answers of {self._options.tokens} tokens, their prompts "
            f"included; medians of {self._options.rounds} rounds, two threads each."
        )

    def write(self) -> None:
        """Write what was found so far, if a file is wanted."""
        if self._options.output is not None:
            self._options.output.write_text(self.table())

    def table(self) -> str:
        """Return what was found so far, in Markdown."""
        rates = [f"tok/s of {count}" for count in ROWS]
        heading = ["form", "perplexity", "against bf16", "MB", *rates]
        heading += ["llama.cpp: MB", *rates]
        first = self._found[self._forms[0].name].perplexity
        rows = []
        for form in self._forms:
            found = self._found[form.name]
            row = [form.name, "", ""]
            if found.perplexity:
                value = found.perplexity[0]
                row[1:] = [f"{value:.3f}", f"{value / first[0] - 1:+.2%}"]
            theirs = _cells(found.llama_cpp)
            if not _is_read_by_llama_cpp(form):
                theirs = [_NOT_READ] * len(theirs)
            rows.append([*row, *_cells(found.swell), *theirs])
        return "\n\n".join([*self._notes, markdown(heading, rows)])


def _is_wanted(form: Form, only: list[str] | None) -> bool:
    return only is None or form.name == "bf16" or any(each in form.name for each in only)


def _is_read_by_llama_cpp(form: Form) -> bool:
    return form.path.suffix == ".gguf" and form.quantization is None


def _cells(visits: list[Visit]) -> list[str]:
    if not visits:
        return [""] * (1 + len(ROWS))
    memory = statistics.median(each.resident_mb for each in visits)
    rates = [statistics.median(each.rates[count] for each in visits) for count in ROWS]
    return [f"{memory:,.0f}", *(f"{rate:,.1f}" for rate in rates)]


def main() -> None:
    """Go through the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file of SmolLM2, or of a similar Llama")
    parser.add_argument("--directory", type=Path, default=Path("build/forms"))
    parser.add_argument("--llama-cpp", type=Path, help="directory of its programs")
    parser.add_argument("--output", type=Path, help="Markdown file")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--only", nargs="+", help="forms besides bf16 with these in their names")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--answer", type=int, default=32, help="tokens of each greedy answer")
    parser.add_argument("--windows", type=int, default=2, help="of 512 tokens of the text")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer of a server")
    options = parser.parse_args()
    settle_environment()
    comparison = Comparison(options)
    for part in options.parts:
        getattr(comparison, part)()
        comparison.write()
    print(comparison.table(), flush=True)


if __name__ == "__main__":
    main()
