"""How well a model in each form of its weights foretells a text, against the one in 16 bits.

python -m benchmarks.model_forms SmolLM2-135M-Instruct.Q4_1.gguf --output forms.md

All forms are computed in bf16. Those that are not at hand are written from the file's weights, each
rounded to the nearest; `--llama-quantize` (llama.cpp's program) adds types of GGUF that the gguf
package cannot write. Prints Markdown, and with `--output` writes it to that file.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.forms.stored import Form, forms
from benchmarks.forms.text import TEXT, perplexity
from benchmarks.versus.report import markdown
from engine.executor.environment import settle_environment


def table(every: Iterable[Form], tokenizer: Tokenizer, windows: int) -> str:
    """Measure all forms, the first of which the others are compared with."""
    rows: list[list[str]] = []
    first, num_tokens = 0.0, 0
    for form in every:
        found = perplexity(form, tokenizer, windows)
        first, num_tokens = first or found.value, found.num_tokens
        rows.append([form.name, f"{found.value:.3f}", f"{found.value / first - 1:+.2%}"])
        print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    heading = f"Perplexity of {num_tokens} tokens ({TEXT}), windows of 512:\n\n"
    return heading + markdown(["form", "perplexity", "against bf16"], rows)


def main() -> None:
    """Write the forms, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file of SmolLM2, or of a similar Llama")
    parser.add_argument("--directory", type=Path, default=Path("build/forms"))
    parser.add_argument("--llama-quantize", type=Path, help="path of llama.cpp's program")
    parser.add_argument("--output", type=Path, help="Markdown file")
    parser.add_argument("--windows", type=int, default=8, help="of 512 tokens of the text")
    options = parser.parse_args()
    settle_environment()
    every = list(forms(options.model, options.directory, options.llama_quantize))
    tokenizer = Tokenizer.from_file(str(every[0].path / "tokenizer.json"))
    text = table(every, tokenizer, options.windows)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
