"""Divides a model's layers into pipeline stages.

The first stage embeds the tokens; the last one has the final norm and the LM head. Stages pass on
the states of a step's tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.models.cache_groups import CacheGroups
from engine.models.spec import ModelSpec, UnsupportedModel


class Stage(NamedTuple):
    """Some consecutive layers of a model."""

    layers: range
    num_layers: int
    """Of the whole model."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the LM head."""
        return self.layers.stop == self.num_layers

    def has(self, module: str) -> bool:
        """Return whether a module, by the decoder's name, is in this stage."""
        if module == "model.embed_tokens":
            return self.is_first
        if module == "lm_head":
            return self.is_last
        return int(module.split(".")[2]) in self.layers

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with only this stage's layers."""
        chosen = slice(self.layers.start, self.layers.stop)
        moe = spec.moe
        if moe is not None:
            moe = msgspec.structs.replace(moe, layers=moe.layers[chosen])
        groups = spec.cache_groups
        return msgspec.structs.replace(
            spec,
            cache_groups=CacheGroups(groups.windows, groups.of_layers[chosen]),
            num_layers=len(self.layers),
            ropes=spec.ropes[chosen],
            windows=spec.windows[chosen],
            moe=moe,
        )


def divide_layers(
    num_layers: int, num_stages: int, layers_of_stages: Sequence[int] | None = None
) -> list[Stage]:
    """Return the stages of a model.

    Layers are divided evenly. Remaining ones go to the middle stages, then to the first, since the
    last also computes the LM head.

    Args:
        layers_of_stages: configured number of layers per stage.

    Raises:
        UnsupportedModel: there are too few layers, or `layers_of_stages` has another sum.
    """
    if layers_of_stages is None:
        if num_layers < num_stages:
            raise UnsupportedModel(
                f"--pipeline-parallel-size {num_stages} is more than the {num_layers} layers of "
                "the model"
            )
        share, rest = divmod(num_layers, num_stages)
        by_right = [*range(1, num_stages - 1), 0][:rest]
        layers_of_stages = [share + (stage in by_right) for stage in range(num_stages)]
    elif sum(layers_of_stages) != num_layers:
        given = ",".join(map(str, layers_of_stages))
        raise UnsupportedModel(
            f"--pipeline-layer-partition {given} has {sum(layers_of_stages)} layers, but the "
            f"model has {num_layers}"
        )
    stages, first = [], 0
    for count in layers_of_stages:
        stages.append(Stage(range(first, first + count), num_layers))
        first += count
    return stages
