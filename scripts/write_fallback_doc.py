"""Writes docs/fallback-models.md: which models of transformers are served without a family.

Every causal language model of transformers is created at a tiny size with random weights, then run
in chunks, batched with a second sequence, over the paged KV cache. This takes a few minutes. Each
model runs in its own process, because some exceed the available memory. With model types as
arguments, the results are only printed.
"""

import errno
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.fallback.loading import load_fallback
from engine.models.fallback.served import check_class, transformers_class
from engine.models.families.registry import FAMILIES
from engine.models.spec import UnsupportedModel
from engine.runner.model_runner import ModelRunner
from engine.shared.config import ModelConfig
from tests.engine.driver import BLOCK_SIZE, NUM_BLOCKS, Driver
from tests.engine.fallback_models import VOCAB_SIZE, save_fallback_model, tiny_config

TARGET = Path(__file__).parent.parent / "docs" / "fallback-models.md"

_MAX_BYTES = 8 << 30
_MAX_SECONDS = 60
"""CPU time rather than wall time, so that the page does not depend on the load of the machine."""
_MAX_ERROR = 1e-3
_NO_MEMORY = ("DefaultCPUAllocator: ", "Cannot allocate memory")
"""Parts of out-of-memory messages."""
_REASON = "it cannot be served: "

_INTRODUCTION = """# Models without a family

Which causal language models of transformers {version} are served [without a
family](models.md#without-a-family). Each was made at a tiny size with random weights, and with
windows shorter than the prompt where the class has windows; it is served if its logits in fp32,
computed in chunks beside another sequence over the paged KV cache, are within 0.001 of those that
transformers computes of the whole sequence with its own attention. `make test-parity` compares
configurations with unusual values. Architectures with a [family](models.md#families) are not
tried. `python -m scripts.write_fallback_doc` generates this page.
"""


class Outcome(NamedTuple):
    """The result for one model type."""

    served: bool
    reason: str


_TOO_LARGE = Outcome(False, "not tried: it takes too long or too much memory at a tiny size")


def refused(error: UnsupportedModel) -> Outcome:
    """Return the reason why a model is not served; running out of memory counts as not tried."""
    if ran_out_of_memory(error):
        return _TOO_LARGE
    return Outcome(False, str(error).split(_REASON)[-1])


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is an out-of-memory error."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def tried(model_type: str) -> Outcome:
    """Create a tiny model of that type and compare its logits with those of transformers."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            named = {"model_type": model_type, "architectures": [architecture]}
            check_class(transformers_class(named), tiny_config(model_type))
            reference = save_fallback_model(model_type, directory)
        except UnsupportedModel as error:
            return refused(error)
        except Exception as error:  # inconsistent sizes raise many types
            if ran_out_of_memory(error):
                return _TOO_LARGE
            print(f"{model_type}: {type(error).__name__}: {error}", file=sys.stderr)
            return Outcome(False, "not tried: no tiny model of it could be made")
        settings = ModelConfig(model=name, dtype="float32")
        try:
            loaded = load_fallback(directory, settings, torch.device("cpu"))
        except UnsupportedModel as error:
            return refused(error)
        runner = ModelRunner(
            loaded.model,
            max_num_seqs=2,
            max_model_len=loaded.model.spec.max_position_embeddings,
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        )
        engine = Driver(runner)
        tokens = [(37 * i + 11) % VOCAB_SIZE for i in range(90)]
        engine.start(0, tokens)
        engine.start(1, tokens[49::-1])
        parts = [engine.logits({0: 30, 1: 10}), engine.logits({1: 5, 0: 50})]
        parts.append(engine.logits({0: 10, 1: 35}))
        logits = torch.cat((parts[0][:30], parts[1][5:], parts[2][:10]))
        difference = float((logits - reference.logits(tokens)).abs().max())
        if difference < _MAX_ERROR:
            return Outcome(True, "")
        return Outcome(False, "WRONG: it is served, but its logits are not those of transformers")


def tried_apart(model_type: str) -> Outcome:
    """Try a model type in a child process with limits on memory and CPU time."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        try:
            outcome = tried(model_type)
        except BaseException as error:
            wrong = Outcome(False, f"WRONG: {type(error).__name__}: {error}")
            outcome = _TOO_LARGE if ran_out_of_memory(error) else wrong
        os.write(writing, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said:
        return _TOO_LARGE
    return Outcome(*json.loads(said))


def render(outcomes: dict[str, Outcome]) -> str:
    """Return the page; outcomes are keyed by model type."""
    served: dict[str, list[str]] = {}
    others: dict[str, str] = {}
    for model_type, outcome in outcomes.items():
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        if outcome.served:
            served.setdefault(name, []).append(f"`{model_type}`")
        else:
            others.setdefault(name, outcome.reason)
    reasons: dict[str, list[str]] = {}
    for name, reason in others.items():
        if name not in served:
            reasons.setdefault(reason, []).append(name)
    page = _INTRODUCTION.format(version=transformers.__version__)
    page += "\n## Served\n\n| architecture | `model_type` |\n|---|---|\n"
    for name in sorted(served):
        page += f"| {name} | {', '.join(served[name])} |\n"
    page += "\n## Not served\n\n| because | architectures |\n|---|---|\n"
    for reason, names in sorted(reasons.items(), key=lambda each: (-len(each[1]), each[0])):
        page += f"| {reason} | {', '.join(sorted(names))} |\n"
    return page


def main(model_types: list[str]) -> None:
    """Try all model types and write the page, or try the given ones and print their results."""
    torch.set_num_threads(1)
    _ = transformers.GPT2LMHeadModel  # import shared modules once, before forking
    every = [
        model_type
        for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if name not in FAMILIES
    ]
    outcomes = {}
    for model_type in model_types or every:
        outcomes[model_type] = tried_apart(model_type)
        print(model_type, *outcomes[model_type], flush=True)
    if not model_types:
        TARGET.write_text(render(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
