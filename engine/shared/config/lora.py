"""Settings of LoRA adapters, and parsing of --lora-modules."""

from typing import Annotated

import msgspec
from msgspec import Meta

from engine.shared.config.section import PositiveInt, Section

MAX_NAME_SIZE = 200


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is loaded at start."""

    name: str
    path: str
    base_model_name: str | None = None
    """If given, has to equal the served model's name."""


class LoraConfig(Section, frozen=True, kw_only=True):
    """Adapters (LoRA)"""

    enable_lora: Annotated[bool, "Serve LoRA adapters in addition to the model."] = False
    max_loras: Annotated[
        int,
        Meta(ge=1, le=256),
        "Maximum adapters in one step; requests for other adapters wait.",
    ] = 1
    max_cpu_loras: Annotated[
        PositiveInt | None,
        "Maximum loaded adapters; default: 64, or --max-loras if that is larger.",
    ] = None
    max_lora_rank: Annotated[int, Meta(ge=1, le=512), "Maximum rank of an adapter."] = 16
    lora_modules: Annotated[
        tuple[str, ...],
        'Adapters to load at the start, each as name=path or as `{"name": ..., "path": ..., '
        '"base_model_name": ...}`.',
    ] = ()
    lora_dir: Annotated[
        str | None,
        "Directory from which adapters may be loaded while the server runs; default: runtime "
        "loading is disabled.",
    ] = None

    def __post_init__(self) -> None:
        if (self.lora_modules or self.lora_dir is not None) and not self.enable_lora:
            raise ValueError("lora_modules and lora_dir need enable_lora")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras is {self.max_cpu_loras}: less than max_loras")
        names = [module.name for module in self.modules]
        if len(set(names)) < len(names):
            raise ValueError("lora_modules has two adapters of one name")

    @property
    def max_held(self) -> int:
        """Maximum number of adapters that an engine keeps in memory."""
        return self.max_cpu_loras or max(64, self.max_loras)

    @property
    def modules(self) -> list[LoraModule]:
        """The adapters to load at start.

        Raises:
            ValueError: an entry is neither name=path nor a valid JSON object.
        """
        return [_parse(text) for text in self.lora_modules]


def _parse(text: str) -> LoraModule:
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=LoraModule)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"lora_modules: {text}: {error}") from error
    else:
        name, _, path = text.partition("=")
        module = LoraModule(name.strip(), path.strip())
    if not module.name or not module.path or len(module.name) > MAX_NAME_SIZE:
        raise ValueError(f"lora_modules: {text} is not name=path")
    return module
