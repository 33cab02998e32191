"""Compares rows of a mixed batch with models that PEFT merged, on a model that is not a test's own.

    python -m tests.engine.lora.parity MODEL [--tensor-parallel-size N] [--pipeline-parallel-size N]

MODEL is a directory or a GGUF file; the reference is transformers' model with the same weights in
float32. Prints how far the log-probabilities of the likeliest tokens of all prompts are apart, and
for a Llama how far both are from what float64 makes of them.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path

import torch
import transformers

from engine.models.families.registry import family_of
from engine.models.hf_config import read_spec
from engine.models.settings import open_checkpoint
from engine.shared.config import ModelConfig
from engine.shared.model_files import model_directory
from tests.engine.driver import Driver
from tests.engine.lora.adapters import exact, train
from tests.engine.lora.processes import (
    REPORTING,
    Processes,
    expected,
    largest_distance,
    reported,
)
from tests.engine.tiny_models import Checkpoint

_LENGTHS = (40, 25, 60, 33, 7)
_ADAPTERS = (0, -1, 1, 0, -1)
"""Of each row."""


def reference(model: str) -> Checkpoint:
    """Return transformers' model; of a GGUF file with its weights expanded."""
    config = ModelConfig(model=model, dtype="float32", device="cpu")
    directory = model_directory(config, weights=True)
    if Path(model).is_dir():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
        return Checkpoint(directory, loaded.train(False))
    spec = read_spec(directory)
    stored = open_checkpoint(directory, spec, config)
    weights = {
        source.name: stored.tensor(name).float()
        for name, source in family_of(spec.architecture).weights(spec).items()
    }
    made_by = getattr(transformers, spec.architecture)
    made = made_by(made_by.config_class.from_pretrained(directory))
    missing, unexpected = made.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    made.tie_weights()
    return Checkpoint(directory, made.float().eval())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=os.path.abspath)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = reference(arguments.model)
    layout = {
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "pipeline_parallel_size": arguments.pipeline_parallel_size,
    }
    with tempfile.TemporaryDirectory() as root:
        adapters = [train(base, Path(root) / str(seed), seed, r=4) for seed in (1, 2)]
        engine = Processes(Path(arguments.model), **layout)
        try:
            steps, draw = Driver(engine.executor), random.Random(1)
            steps.adapters = dict(enumerate(engine.load(each.directory) for each in adapters))
            vocab = base.reference.config.vocab_size
            references, truth = {}, {}
            for row, (length, adapter) in enumerate(zip(_LENGTHS, _ADAPTERS, strict=True)):
                prompt = [draw.randrange(vocab) for _ in range(length)]
                steps.start(row, prompt, REPORTING, adapter=adapter)
                references[row] = base if adapter < 0 else adapters[adapter].merged
                if type(base.reference).__name__.startswith("Llama"):
                    truth[row] = exact(base, None if adapter < 0 else adapters[adapter].directory)
            found = reported(steps, references)
            ours = [each.logprobs for each in found]
            theirs = expected(steps, references, found)
            print(f"{base.directory.name} {layout}: {largest_distance(ours, theirs):.1e}")
            if truth:
                wanted = expected(steps, truth, found)
                for name, each in (("ours", ours), ("transformers'", theirs)):
                    print(f"{name} from float64: {largest_distance(each, wanted):.1e}")
        finally:
            engine.executor.shutdown()


if __name__ == "__main__":
    main()
