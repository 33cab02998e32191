"""Writes the first layers of a Llama-like model, with its embedding and LM head, as another model.

python -m benchmarks.cut_model MODEL LAYERS DIRECTORY

Good for a draft model that has the target's tokens; nothing is trained.
"""

import argparse
import json
import shutil
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from engine.models.families.placing import llama_weights
from engine.models.hf_config import read_spec
from engine.models.settings import open_checkpoint
from engine.shared.config import ModelConfig
from engine.shared.model_files import model_directory

_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def cut_model(model: str, layers: int, target: Path) -> None:
    """Write a model of so many layers into a directory, which is made if it is not there.

    Raises:
        ValueError: the model does not have Llama's tensors, or not so many layers.
    """
    config = ModelConfig(model=model)
    directory = model_directory(config, weights=True)
    spec = read_spec(directory)
    if spec.architecture != "LlamaForCausalLM" or not 0 < layers <= spec.num_layers:
        raise ValueError(f"{model} is a {spec.architecture} of {spec.num_layers} layers")
    checkpoint = open_checkpoint(directory, spec, config)
    weights = llama_weights(msgspec.structs.replace(spec, num_layers=layers))
    tensors = {
        source.name: checkpoint.tensor(name).to(checkpoint.dtype).clone()
        for name, source in weights.items()
    }
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    settings = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": layers}))
    for name in _TEXT_FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, target / name)


def main() -> None:
    """Cut as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    cut_model(options.model, options.layers, options.directory)


if __name__ == "__main__":
    main()
