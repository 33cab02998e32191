"""One model divided into pipeline stages: which layers each of them has.

The first stage embeds the tokens, the last one norms the final states and has the LM head. Between
stages travel the states of a step's tokens.
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
        """Whether a module, by the decoder's name, is here."""
        if module == "model.embed_tokens":
            return self.is_first
        if module == "lm_head":
            return self.is_last
        return int(module.split(".")[2]) in self.layers

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the model as this stage computes it: the given one with these layers only."""
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

    They get equally many layers. Some in the middle get one more if that does not work out, then
    the first: the last one has the LM head to compute besides.

    Args:
        layers_of_stages: how many each gets, if that was chosen.

    Raises:
        UnsupportedModel: the model has not so many layers, or more.
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
            f"--pipeline-layer-partition {given} is of {sum(layers_of_stages)} layers, but the "
            f"model has {num_layers}"
        )
    stages, first = [], 0
    for count in layers_of_stages:
        stages.append(Stage(range(first, first + count), num_layers))
        first += count
    return stages
