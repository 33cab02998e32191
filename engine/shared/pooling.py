"""Whether and how a model embeds or classifies instead of generating, read from its files.

Engines pool accordingly and front ends prepare inputs; both read the same files. The files of
sentence-transformers override the architecture's defaults, and `--pooler-config` overrides both.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
from msgspec import Meta

from engine.shared.config import ModelConfig

Task = Literal["embed", "classify"]
TokenTask = Literal["token_embed", "token_classify"]
"""The same tasks per token."""
Pooling = Literal["cls", "mean", "last", "max", "mean_sqrt_len"]
Activation = Literal["identity", "sigmoid", "softmax"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Similarity of two embeddings; the last two are negative distances."""

ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
"""Name prefixes of architectures with bidirectional attention."""
MAX_PROMPT_LENGTH = 4096
"""Maximum characters of a prompt that is prepended to inputs."""

_MODES: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
}
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older equivalents of `pooling_mode`: exactly one is true."""
_CLASSIFIERS = ("ForSequenceClassification",)


class BadPooling(ValueError):
    """The model's files or the settings specify an unsupported pooling."""


class TokenPooling(msgspec.Struct, frozen=True):
    """Settings of per-token vectors."""

    is_usual: bool = False
    """Whether /pooling returns them to requests without a task."""
    step_tag_id: int | None = None
    """The only token whose vectors are returned; None: all tokens."""


class LogitScale(msgspec.Struct, frozen=True):
    """Maps each output of a classifier to (output - mean) / sigma."""

    mean: float = 0.0
    sigma: float = 1.0


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model computes one vector per sequence."""

    task: Task
    """embed: vectors to compare; classify: a score per label, for one text or a pair."""
    pooling: Pooling
    """How token states are reduced to one vector."""
    normalize: bool = False
    """Whether embeddings are scaled to unit length."""
    activation: Activation = "identity"
    """Converts a classifier's outputs to scores."""
    size: int
    """Vector length: the hidden size, or the number of labels."""
    labels: tuple[str, ...] = ()
    is_encoder: bool = False
    """Whether attention is bidirectional, so that a sequence is computed in one step."""
    max_length: int | None = None
    """Maximum sequence length in tokens, from the files of sentence-transformers."""
    prompts: dict[str, str] = {}
    """Prompts that can be prepended to inputs, by name."""
    default_prompt: str | None = None
    """Name of the prompt for inputs that specify none."""
    dimensions: tuple[int, ...] | None = None
    """Sizes to which embeddings can be truncated (Matryoshka); empty: any; None: not supported."""
    similarity: Similarity = "cosine"
    """Similarity that scores a pair of embeddings."""
    usual_dimensions: int = 0
    """Size to which embeddings are truncated by default; 0: not truncated."""
    logits: LogitScale | None = None
    """Applied to a classifier's outputs before the activation."""
    tokens: TokenPooling | None = None
    """Configured per-token vectors; None: not configured."""

    @property
    def in_one_step(self) -> bool:
        """Whether a sequence has to be computed in one step, as pooling needs all its tokens."""
        return self.is_encoder or self.pooling != "last" or self.tokens is not None


_Count = Annotated[int, Meta(ge=1)]


class _Overrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of `--pooler-config`; names as in vLLM where it has them."""

    task: Task | TokenTask | None = None
    pooling_type: Literal["CLS", "MEAN", "LAST", "MAX", "ALL", "STEP"] | None = None
    """Stands for either of the next two."""
    seq_pooling_type: Literal["CLS", "MEAN", "LAST", "MAX"] | None = None
    tok_pooling_type: Literal["ALL", "STEP"] | None = None
    step_tag_id: Annotated[int, Meta(ge=0)] | None = None
    """With STEP: the token whose vectors are returned."""
    use_activation: bool | None = None
    """False: raw outputs of classifiers, embeddings that are not normalized."""
    normalize: bool | None = None
    softmax: bool | None = None
    """`normalize` and `softmax` are older names of `use_activation`, for embeddings and scores."""
    activation: Activation | bool | None = None
    """Activation of a classifier; true and false as in `use_activation`."""
    max_embed_len: _Count | None = None
    dimensions: _Count | tuple[_Count, ...] | None = None
    """An int: embeddings are truncated to it. A list: sizes that requests can use; empty: any."""
    logit_mean: float | None = None
    logit_sigma: float | None = None
    enable_chunked_processing: bool = False
    returned_token_ids: tuple[int, ...] | None = None


def read_pooling(directory: Path, model: ModelConfig) -> PoolingSpec | None:
    """Return how the model in a directory pools; None if it generates.

    Raises:
        BadPooling: settings and files contradict each other, or specify something unsupported.
    """
    config = _object(directory / "config.json")
    config |= config.get("text_config") or {}
    architecture = str((config.get("architectures") or [""])[0])
    is_encoder = architecture.startswith(ENCODERS)
    modules = _modules(directory)
    classifies = architecture.endswith(_CLASSIFIERS)
    headless = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    pools = is_encoder or classifies or headless or bool(modules)
    if model.runner == "generate" and (is_encoder or classifies):
        raise BadPooling(
            f"--runner generate: {architecture} generates nothing; leave --runner at auto"
        )
    if model.runner == "generate" or (model.runner == "auto" and not pools):
        if model.pooler_config != "{}":
            raise BadPooling("--pooler-config: this model generates; set --runner pooling")
        return None
    try:
        overrides = msgspec.json.decode(model.pooler_config, type=_Overrides)
    except msgspec.DecodeError as error:
        raise BadPooling(f"--pooler-config: {error}") from error
    task = "classify" if classifies else "embed"
    if overrides.task is not None and overrides.task.removeprefix("token_") != task:
        raise BadPooling(f"--pooler-config: {architecture} cannot {overrides.task}")
    read = _classifier if classifies else _embedder
    spec = read(directory, config, modules, is_encoder=is_encoder)
    return _overridden(spec, overrides)


def _embedder(
    directory: Path, config: dict[str, Any], modules: list[tuple[str, str]], *, is_encoder: bool
) -> PoolingSpec:
    pooling: Pooling = "cls" if is_encoder else "last"
    normalize = True
    known = {"Transformer", "Pooling", "Normalize"}
    unknown = [kind for kind, _ in modules if kind not in known]
    if unknown:
        raise BadPooling(
            f"{directory / 'modules.json'}: modules {', '.join(unknown)} are not supported, only "
            f"{', '.join(sorted(known))}"
        )
    for kind, path in modules:
        if kind == "Pooling":
            pooling = _pooling_mode(directory / path / "config.json")
    if modules:
        normalize = any(kind == "Normalize" for kind, _ in modules)
    first = next((path for kind, path in modules if kind == "Transformer"), "")
    sentence = _object(directory / first / "sentence_bert_config.json")
    library = _object(directory / "config_sentence_transformers.json")
    prompts = {
        str(name): text
        for name, text in (library.get("prompts") or {}).items()
        if isinstance(text, str)
    }
    if any(len(text) > MAX_PROMPT_LENGTH for text in prompts.values()):
        raise BadPooling(f"prompts have at most {MAX_PROMPT_LENGTH} characters")
    size, sizes = config.get("hidden_size"), config.get("matryoshka_dimensions")
    if not isinstance(size, int):
        raise BadPooling("config.json: hidden_size must be an integer")
    dimensions = () if config.get("is_matryoshka") else None
    similarity = library.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        raise BadPooling(
            f"config_sentence_transformers.json: similarity_fn_name {similarity!r} is not "
            f"supported, only {', '.join(get_args(Similarity))}"
        )
    return PoolingSpec(
        task="embed",
        pooling=pooling,
        normalize=normalize,
        size=size,
        is_encoder=is_encoder,
        max_length=sentence.get("max_seq_length"),
        prompts=prompts,
        default_prompt=library.get("default_prompt_name"),
        dimensions=tuple(sizes) if isinstance(sizes, list) else dimensions,
        similarity=cast("Similarity", similarity),
    )


def _classifier(
    directory: Path, config: dict[str, Any], modules: list[tuple[str, str]], *, is_encoder: bool
) -> PoolingSpec:
    names = config.get("id2label") or {}
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    count = config.get("num_labels") or len(labels) or 2
    labels = labels or tuple(f"LABEL_{index}" for index in range(count))
    pooling: Pooling = "cls" if is_encoder else "last"
    if config.get("classifier_pooling") == "mean":
        pooling = "mean"
    library = _object(directory / "config_sentence_transformers.json")
    return PoolingSpec(
        task="classify",
        pooling=pooling,
        activation=_activation(config, library, count),
        size=count,
        labels=labels,
        is_encoder=is_encoder,
    )


def _activation(config: dict[str, Any], library: dict[str, Any], labels: int) -> Activation:
    """Return the activation named by sentence-transformers' files, else a default by labels."""
    nested = config.get("sentence_transformers")
    named = (
        library.get("activation_fn")
        or (nested.get("activation_fn") if isinstance(nested, dict) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    if named is not None:
        kinds: dict[str, Activation] = {
            "Identity": "identity",
            "Sigmoid": "sigmoid",
            "Softmax": "softmax",
        }
        kind = str(named).rsplit(".", 1)[-1]
        if kind not in kinds:
            raise BadPooling(f"config.json: activation {named!r} is not supported")
        return kinds[kind]
    if config.get("problem_type") == "regression":
        return "identity"
    one_by_one = labels == 1 or config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if one_by_one else "softmax"


def _overridden(spec: PoolingSpec, overrides: _Overrides) -> PoolingSpec:
    """Apply `--pooler-config` to a spec.

    Raises:
        BadPooling: keys contradict each other, or specify something unsupported.
    """
    _check_overrides(spec, overrides)
    of_tokens = overrides.tok_pooling_type or overrides.pooling_type
    is_usual = overrides.pooling_type in ("ALL", "STEP")
    if overrides.task is not None:
        is_usual = overrides.task.startswith("token_")
    changes: dict[str, Any] = {"tokens": None}
    if of_tokens in ("ALL", "STEP") or is_usual:
        changes["tokens"] = TokenPooling(is_usual, overrides.step_tag_id)
    of_sequences = overrides.seq_pooling_type or overrides.pooling_type
    if of_sequences not in (None, "ALL", "STEP"):
        changes["pooling"] = of_sequences.lower()
    if overrides.normalize is not None:
        changes["normalize"] = overrides.normalize
    if False in (overrides.use_activation, overrides.softmax, overrides.activation):
        changes |= {"normalize": False, "activation": "identity"}
    if isinstance(overrides.activation, str):
        changes["activation"] = overrides.activation
    if overrides.max_embed_len is not None:
        changes["max_length"] = overrides.max_embed_len
    if isinstance(overrides.dimensions, int):
        changes["usual_dimensions"] = overrides.dimensions
        if spec.dimensions is None:
            changes["dimensions"] = (overrides.dimensions,)
    elif overrides.dimensions is not None:
        changes["dimensions"] = overrides.dimensions
    if overrides.logit_mean is not None or overrides.logit_sigma is not None:
        sigma = 1.0 if overrides.logit_sigma is None else overrides.logit_sigma
        changes["logits"] = LogitScale(overrides.logit_mean or 0.0, sigma)
    return msgspec.structs.replace(spec, **changes)


def _check_overrides(spec: PoolingSpec, overrides: _Overrides) -> None:
    numbers = [each for each in (overrides.logit_mean, overrides.logit_sigma) if each is not None]
    steps = "STEP" in (overrides.pooling_type, overrides.tok_pooling_type)
    twice = overrides.seq_pooling_type or overrides.tok_pooling_type
    sizes = overrides.dimensions if isinstance(overrides.dimensions, int) else 0
    refused = {
        "pooling_type stands for seq_pooling_type or tok_pooling_type: leave it out": (
            overrides.pooling_type is not None and twice is not None
        ),
        "step_tag_id and STEP need each other; ALL has all tokens": (
            steps != (overrides.step_tag_id is not None)
        ),
        "logit_mean and logit_sigma are for classifiers": bool(numbers) and spec.task == "embed",
        "logit_mean and logit_sigma must be finite, and logit_sigma not 0": (
            not all(map(math.isfinite, numbers)) or overrides.logit_sigma == 0
        ),
        f"dimensions: embeddings have {spec.size} numbers": sizes > spec.size,
        "dimensions are for embeddings": (
            overrides.dimensions is not None and spec.task == "classify"
        ),
        "enable_chunked_processing is not supported: inputs longer than the model takes are "
        "refused, or cut with truncate_prompt_tokens": overrides.enable_chunked_processing,
        "returned_token_ids is not supported: vectors have all of a model's outputs": (
            overrides.returned_token_ids is not None
        ),
    }
    reasons = [reason for reason, asked in refused.items() if asked]
    if reasons:
        raise BadPooling(f"--pooler-config: {'; '.join(reasons)}")


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Return kind and directory of each module in modules.json, in order; empty if missing."""
    path = directory / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except msgspec.DecodeError as error:
        raise BadPooling(f"{path}: {error}") from error
    return [(module.type.rsplit(".", 1)[-1], module.path) for module in modules]


class _Module(msgspec.Struct):
    type: str
    path: str


def _pooling_mode(path: Path) -> Pooling:
    config = _object(path)
    chosen = config.get("pooling_mode")
    if chosen is None:
        switches = [name for name, on in config.items() if name.startswith("pooling_") and on]
        chosen = [_SWITCHES.get(name, name) for name in switches]
    modes = chosen if isinstance(chosen, list) else [chosen]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise BadPooling(
            f"{path}: pooling {modes} is not supported, only one of {', '.join(_MODES)}"
        )
    if config.get("include_prompt") is False:
        raise BadPooling(f"{path}: include_prompt false is not supported")
    return _MODES[modes[0]]


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadPooling(f"{path}: {error}") from error
