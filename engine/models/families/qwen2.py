"""Qwen 2 and 2.5: biases on queries, keys and values; some layers may have windows."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import (
    integer,
    layer_windows,
    llama_spec,
    switched_window,
)
from engine.models.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    return replace(
        llama_spec(config), qkv_bias=True, output_bias=False, windows=qwen_windows(config)
    )


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Return each layer's window: `use_sliding_window` turns them on, from some layer on."""
    layers, first = integer(config, "num_hidden_layers"), config.get("max_window_layers")
    window, kinds = switched_window(config), config.get("layer_types")
    if kinds is not None:
        return layer_windows(config.but(sliding_window=window))
    return tuple(window if layer >= first else None for layer in range(layers))


FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    spec=_spec,
    weights=llama_weights,
    ignored=("use_mrope",),
)
