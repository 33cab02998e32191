"""Reads an adapter's `adapter_config.json`: ranks and scales, or why it cannot be served."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

MAX_CONFIG_SIZE = 1 << 20
"""Maximum bytes of the file."""

_MAX_PATTERNS = 1000
_MAX_PATTERN_SIZE = 300
_MAX_EXPRESSIONS = 64
"""Maximum patterns that are not plain names."""
_NAME = re.compile(r"(?:[\w-]|\\?\.)*+")
"""A pattern that is the name or name suffix of a module; its dots are only matched literally."""


class BadAdapter(ValueError):
    """An adapter cannot be served; the message states the reason."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of PEFT's `LoraConfig` that matters once an adapter is trained.

    The adapted modules are known from the tensors, since PEFT only saves theirs: `target_modules`
    can have any of its forms and is not evaluated.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    """Ranks of modules with another rank, by name suffixes or patterns."""
    alpha_pattern: dict[str, float] = {}
    base_model_name_or_path: str | None = None
    """Name of the base model, informational."""

    def rank(self, module: str) -> int:
        """Return the required rank of a module's tensors."""
        return int(_matching(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return the scale of the product of a module's two matrices."""
        alpha, rank = _matching(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "it is trained with DoRA"),
    "use_qalora": ((None, False), "it is trained with QALoRA"),
    "bias": ((None, "none"), "it changes biases"),
    "lora_bias": ((None, False), "its matrices have biases"),
    "fan_in_fan_out": ((None, False), "its base stores weights transposed (fan_in_fan_out)"),
    "modules_to_save": ((None, []), "it replaces whole modules (modules_to_save)"),
    "layer_replication": ((None, []), "it repeats layers (layer_replication)"),
    "trainable_token_indices": ((None, [], {}), "it replaces embeddings of single tokens"),
    "alora_invocation_tokens": ((None, []), "it begins in the middle of a prompt (aLoRA)"),
}
"""By key: the supported values, and the meaning of any other."""

_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base's weights unchanged."""


def parse_adapter_config(data: bytes) -> AdapterConfig:
    """Parse the file's content.

    Raises:
        BadAdapter: it is invalid, or requires something unsupported.
    """
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadAdapter(f"adapter_config.json is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadAdapter("adapter_config.json does not hold a JSON object")
    kind = content.get("peft_type", "LORA")
    if kind != "LORA":
        raise BadAdapter(f"adapter_config.json: peft_type is {_shown(kind)}, not LORA")
    for key, (served, meaning) in _REFUSED.items():
        if content.get(key) not in served:
            raise BadAdapter(f"adapter_config.json: {meaning}, which is not supported")
    start = content.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise BadAdapter(
            f"adapter_config.json: init_lora_weights {_shown(start)} changes the base's weights; "
            "convert the adapter to a plain one with PEFT"
        )
    config = _converted(content)
    _check(config)
    return config


def _converted(content: dict[str, Any]) -> AdapterConfig:
    fields = {name: content[name] for name in AdapterConfig.__struct_fields__ if name in content}
    missing = [name for name in ("r", "lora_alpha") if fields.get(name) is None]
    if missing:
        raise BadAdapter(f"adapter_config.json has no {missing[0]}")
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(fields, AdapterConfig)
    except msgspec.ValidationError as error:
        raise BadAdapter(f"adapter_config.json: {error}") from error


def _check(config: AdapterConfig) -> None:
    ranks = [config.r, *config.rank_pattern.values()]
    if min(ranks) < 1:
        raise BadAdapter(f"adapter_config.json: r is {min(ranks)}: it must be at least 1")
    if max(len(config.rank_pattern), len(config.alpha_pattern)) > _MAX_PATTERNS:
        raise BadAdapter(f"adapter_config.json has more than {_MAX_PATTERNS} patterns")
    patterns = (*config.rank_pattern, *config.alpha_pattern)
    if sum(not _NAME.fullmatch(pattern) for pattern in patterns) > _MAX_EXPRESSIONS:
        raise BadAdapter(
            f"adapter_config.json has more than {_MAX_EXPRESSIONS} patterns that are not names"
        )
    for pattern in patterns:
        if len(pattern) > _MAX_PATTERN_SIZE:
            raise BadAdapter(f"adapter_config.json: the pattern {_shown(pattern)} is too complex")
        try:
            _ends_with(pattern)
        except ValueError as error:
            raise BadAdapter(
                f"adapter_config.json: {_shown(pattern)} is not a supported regular "
                f"expression: {str(error)[:200]}"
            ) from error


def _matching(patterns: dict[str, Any], module: str, otherwise: float) -> float:
    """Return the value of the first pattern that a module's name ends with, as PEFT does."""
    for pattern, value in patterns.items():
        if _ends_with(pattern)(module):
            return float(value)
    return otherwise


@functools.lru_cache(maxsize=2 * _MAX_EXPRESSIONS)
def _ends_with(pattern: str) -> Callable[[str], bool]:
    """Return a predicate: whether a module's name, or its part after a dot, matches the pattern.

    Raises:
        ValueError: it is not a supported regular expression.
    """
    if _NAME.fullmatch(pattern):
        name = pattern.replace("\\.", ".")
        return lambda module: module == name or module.endswith(f".{name}")
    from engine.shared.matchers import Expression

    bare = pattern.removeprefix("^")
    prefix = r"(.*\.)?" if bare == pattern else ""
    return Expression(f"{prefix}({bare.removesuffix('$')})").matches


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
