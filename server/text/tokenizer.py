"""The served model's tokenizer, read from its files without transformers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Sequential

from engine.shared.config import ModelConfig
from engine.shared.end_tokens import end_token_ids
from server.errors import invalid_field
from server.text.chat_template import RESERVED_ARGUMENTS, ChatTemplate
from server.text.placeholders import Placeholders
from server.text.sampling_defaults import (
    Preset,
    SamplingDefaults,
    preset_of,
    read_sampling_defaults,
)

# More than this takes over a millisecond and is done off the event loop.
_INLINE_CHARACTERS = 4000
_INLINE_TOKENS = 4000

_BATCH_CHARACTERS = 1 << 17
"""Maximum characters encoded at once; each takes about a hundred bytes of memory."""

NO_DEFAULTS = SamplingDefaults()

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(ValueError):
    """The model's tokenizer files are missing or unusable; the message says what to do."""


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Check that token IDs are in the model's vocabulary.

    Raises:
        ApiError: one is not; the error names `field`.
    """
    if token_ids and max(token_ids) >= vocab_size:
        raise invalid_field(
            field, f"token id {max(token_ids)} is not in the vocabulary of {vocab_size} tokens"
        )


class ServedTokenizer:
    """Tokenizer, special tokens and chat template of one model."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        sampling_defaults: SamplingDefaults = NO_DEFAULTS,
        preset: Preset = Preset(),
        named_tokens: Mapping[str, str] = MappingProxyType({}),
        placeholders: Placeholders | None = None,
    ) -> None:
        """Wrap a tokenizer.

        Args:
            vocab_size: of the model, which may be padded beyond the tokenizer's.
            placeholders: image placeholders of a model that takes images.
        """
        self.placeholders = placeholders
        found = [backend.token_to_id(text) for text in placeholders.texts] if placeholders else []
        self.placeholder_ids = frozenset(each for each in found if each is not None)
        """Token IDs that only images can add to a prompt."""
        self.backend = backend
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.chat_template = chat_template
        self.sampling_defaults = sampling_defaults
        self.named_tokens = named_tokens
        """Text of named tokens such as `bos_token`, for templates."""
        self.preset = preset
        """Known properties of the model."""
        special = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special = frozenset(special)
        self.special_tokens = tuple(special.values())
        """Texts of the special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token IDs of a text; escaped placeholders are encoded as plain text."""
        if self.placeholders is None or not self.placeholders.hides(text):
            batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids
        pieces = list(self.placeholders.pieces(text))
        batch = self.backend.encode_batch_fast(pieces, add_special_tokens=False)
        ids = [token_id for encoding in batch for token_id in encoding.ids]
        if not add_special_tokens:
            return ids
        around = self.backend.encode("a", add_special_tokens=True)
        added = around.special_tokens_mask
        first = added.index(0)
        last = len(added) - added[::-1].index(0)
        return [*around.ids[:first], *ids, *around.ids[last:]]

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of several texts."""
        if self.placeholders is not None and any(map(self.placeholders.hides, texts)):
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        batch = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    async def encode_many_async(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Like `encode_many`, off the event loop and in batches that bound the memory."""
        each = self.encode_each_async(texts, add_special_tokens=add_special_tokens)
        return [token_ids async for token_ids in each]

    async def encode_each_async(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> AsyncGenerator[list[int]]:
        """Like `encode_many_async`, one text at a time for callers that may stop early."""
        for batch in _batches(texts):
            if sum(map(len, batch)) + len(batch) <= _INLINE_CHARACTERS:
                encoded = self.encode_many(batch, add_special_tokens=add_special_tokens)
            else:
                encoded = await asyncio.to_thread(
                    self.encode_many, batch, add_special_tokens=add_special_tokens
                )
            for token_ids in encoded:
                yield token_ids

    async def encode_async(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Like `encode`, off the event loop if the text is long."""
        if len(text) <= _INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token IDs; unknown IDs are skipped."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Like `decode`, off the event loop if there are many."""
        if len(token_ids) <= _INLINE_TOKENS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(
            self.decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    def id_to_token(self, token_id: int) -> str:
        """Return the vocabulary's string for an ID, empty if there is none."""
        return self.backend.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special: omitted from text with `skip_special_tokens`."""
        return token_id in self._special

    def token_to_id(self, text: str) -> int | None:
        """Return the ID of a string in the vocabulary, None if there is none."""
        return self.backend.token_to_id(text)

    def is_special_text(self, text: str) -> bool:
        """Return whether a text is that of a special token."""
        return self.backend.token_to_id(text) in self._special

    @classmethod
    def load(
        cls, directory: Path, model: ModelConfig, placeholders: Placeholders | None = None
    ) -> Self:
        """Load tokenizer.json and related files from a model directory.

        Args:
            directory: contains tokenizer.json; tokenizer_config.json, special_tokens_map.json,
                chat_template.jinja, config.json and generation_config.json are used if present.
            model: settings that can replace the model's chat template and its source of sampling
                defaults.

        Raises:
            TokenizerError: a file is missing or invalid.
            BadGenerationConfig: the generation config is missing or invalid.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{directory} has no tokenizer.json. Save one there with a fast tokenizer: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no more specific type
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        _add_tokens(backend, config)
        if _read_json(directory / "sentence_bert_config.json").get("do_lower_case"):
            own = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = Sequential([Lowercase(), *own])
        special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
        named = _templates(directory, config, model.chat_template)
        source = named.get("default")
        try:
            template = (
                None
                if source is None
                else ChatTemplate(
                    source,
                    special_tokens | _template_defaults(model.default_chat_template_kwargs),
                    named.get("tool_use"),
                )
            )
        except ValueError as error:
            raise TokenizerError(str(error)) from error
        network = _read_json(directory / "config.json")
        network |= network.get("text_config") or {}
        names = [str(network.get("_name_or_path") or ""), Path(model.model).name]
        preset = preset_of(
            str(network.get("model_type") or ""),
            " ".join(names),
            gguf=model.model.endswith(".gguf"),
        )
        return cls(
            backend,
            vocab_size=network.get("vocab_size"),
            eos_token_ids=end_token_ids(
                directory, network, _read_json(directory / "generation_config.json")
            ),
            chat_template=template,
            sampling_defaults=read_sampling_defaults(
                directory,
                model.generation_config,
                model.override_generation_config,
                preset.sampling,
            ),
            named_tokens=special_tokens,
            preset=preset,
            placeholders=placeholders,
        )


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split texts into batches of limited size in characters; a longer text is its own batch."""
    first = size = 0
    for index, text in enumerate(texts):
        if index > first and size + len(text) > _BATCH_CHARACTERS:
            yield texts[first:index]
            first, size = index, 0
        size += len(text)
    yield texts[first:]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return content


def _add_tokens(backend: Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens of tokenizer_config.json that tokenizer.json lacks, or defines differently."""
    described = config.get("added_tokens_decoder") or {}
    try:
        for number in sorted(described, key=int):
            token = {key: value for key, value in described[number].items() if key != "__type"}
            add = backend.add_special_tokens if token.get("special") else backend.add_tokens
            add([AddedToken(**token)])
    except (AttributeError, TypeError, ValueError) as error:
        raise TokenizerError(f"tokenizer_config.json: added_tokens_decoder: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return texts by name; files store a token as a string or as an object with `content`."""
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _template_defaults(setting: str) -> dict[str, Any]:
    flag = "--default-chat-template-kwargs"
    try:
        defaults = json.loads(setting)
    except ValueError as error:
        raise TokenizerError(f"{flag} is not valid JSON: {error}") from error
    if not isinstance(defaults, dict):
        raise TokenizerError(f"{flag} is not a JSON object")
    if reserved := RESERVED_ARGUMENTS.intersection(defaults):
        raise TokenizerError(f"{flag}: {min(reserved)!r} can only be set in a request")
    return defaults


def _templates(directory: Path, config: dict[str, Any], given: str | None) -> dict[str, str]:
    """Return the model's chat templates by name; `default` is used if none is named."""
    if given is not None:
        if "{{" in given or "{%" in given or "\n" in given:
            return {"default": given}
        try:
            return {"default": Path(given).expanduser().read_text(encoding="utf-8")}
        except OSError as error:
            raise TokenizerError(f"--chat-template cannot be read: {error}") from error
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        others = (directory / "additional_chat_templates").glob("*.jinja")
        named = {file.stem: file.read_text(encoding="utf-8") for file in others}
        return {**named, "default": own_file.read_text(encoding="utf-8")}
    source = config.get("chat_template") or _read_json(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return {"default": next(iter(named.values())), **named} if named else {}
    return {"default": source} if isinstance(source, str) else {}
