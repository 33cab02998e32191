"""The served model as requests for vectors meet it, made once per process."""

from typing import Self

import msgspec

from engine.shared.pooling import PoolingSpec
from server.generate.pooling.inputs import InputMaker
from server.text.frames import Frames
from server.text.tokenizer import ServedTokenizer


class PoolingModel(msgspec.Struct, frozen=True):
    """How the model pools, and what makes its inputs."""

    spec: PoolingSpec
    inputs: InputMaker

    @classmethod
    def of(cls, spec: PoolingSpec | None, tokenizer: ServedTokenizer) -> Self | None:
        """Return the model; None if it generates."""
        if spec is None:
            return None
        return cls(spec, InputMaker(tokenizer, Frames.of(tokenizer.backend)))

    def prompt(self, name: str | None, *fallbacks: str) -> str:
        """Return the prompt of a name, else the default one, or the first there is of others.

        Raises:
            KeyError: there is none of that name.
        """
        spec = self.spec
        if name is not None:
            return spec.prompts[name]
        found = next((each for each in fallbacks if each in spec.prompts), spec.default_prompt)
        return spec.prompts.get(found, "") if found is not None else ""
