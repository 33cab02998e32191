"""End-of-answer tokens of a model, collected from all of its files that name any."""

from pathlib import Path
from typing import Any

import msgspec


class _Added(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []
    model: _Vocabulary = msgspec.field(default_factory=_Vocabulary)


def named_end_tokens(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Return the end tokens named by generation_config.json or else config.json (both decoded)."""
    eos = generation.get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    return tuple(each for each in (eos if isinstance(eos, list) else [eos]) if each is not None)


def end_token_ids(
    directory: Path, config: dict[str, Any], generation: dict[str, Any]
) -> tuple[int, ...]:
    """Return a model's end tokens, including the one named by its tokenizer's files.

    The other files of fine-tuned models often name only the base model's end token, which the
    fine-tuned model does not generate.
    """
    ids = named_end_tokens(config, generation)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = (_decoded(directory / name, dict[str, Any]) or {}).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            ids += _ids(directory / "tokenizer.json", text)
            break
    return tuple(dict.fromkeys(ids))


def _ids(path: Path, text: str) -> tuple[int, ...]:
    tokenizer = _decoded(path, _Tokenizer)
    if tokenizer is None:
        return ()
    vocabulary = tokenizer.model.vocab
    if isinstance(vocabulary, list):  # unigram models: (text, score) pairs
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary) if entry}
    found = {**vocabulary, **{each.content: each.id for each in tokenizer.added_tokens}}.get(text)
    return () if found is None else (found,)


def _decoded(path: Path, type: Any) -> Any:
    """Return a decoded file, None if it is missing or malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except (OSError, msgspec.MsgspecError):
        return None
