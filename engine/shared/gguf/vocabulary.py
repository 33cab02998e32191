"""The tokenizer of a GGUF file, in the words of a Hugging Face tokenizer.json."""

from typing import Any

from engine.shared.gguf.reader import BadGguf

_CONTROL, _USER_DEFINED = 3, 4
_MAX_TOKENS = 1 << 21
_MAX_PAIRS = 1 << 27
"""Characters of all pairs that tokens may be merged from, which a made-up vocabulary could drive
up."""

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""

Json = dict[str, Any]


def tokenizer_of(metadata: Json) -> Json:
    """Return the tokenizer.

    Raises:
        BadGguf: it is missing, of a kind that is not served, or makes no sense.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise BadGguf("the tokenizer has tokens twice")
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif kind == "llama":
        parts = _sentence_piece(metadata, tokens)
    else:
        raise BadGguf(f"tokenizers of type {kind!r} are not served, only gpt2 and llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(metadata, tokens)),
        **parts,
        "post_processor": _beginning(metadata, tokens, parts["post_processor"]),
    }


def special_tokens(metadata: Json) -> dict[str, str]:
    """Return the texts of the tokens that have names, for tokenizer_config.json."""
    tokens = _strings(metadata, "tokens")
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {}
    for theirs, ours in names.items():
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(number, int) and number < len(tokens):
            found[f"{ours}_token"] = tokens[number]
    return found


def _strings(metadata: Json, name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BadGguf(f"the file has no tokenizer.ggml.{name}: it holds no tokenizer")
    if not found or len(found) > _MAX_TOKENS:
        raise BadGguf(f"{len(found)} tokenizer.ggml.{name} are not possible")
    return found


def _added(metadata: Json, tokens: list[str]) -> list[Json]:
    """Return the tokens that are found in texts before these are cut."""
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]


def _byte_level(metadata: Json, tokens: list[str]) -> Json:
    merges = [merge.split(" ") for merge in _strings(metadata, "merges")]
    known = set(tokens)
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= known:
            raise BadGguf(f"the tokenizer merges {merge[:3]} to what is no token")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _CUTS:
        raise BadGguf(
            f"texts are cut by {pre!r}, which is not served; served are {', '.join(_CUTS)}"
        )
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _cut(_CUTS[pre], byte_level),
        "post_processor": None,
        "decoder": byte_level,
        "model": _bpe(tokens, merges, ignore_merges=_CUTS[pre] == _LLAMA_3),
    }


_CUTS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": "digits",
    "refact": "digits",
    "starcoder": "digits",
    "llama-bpe": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama3": _LLAMA_3,
    "qwen2": _QWEN_2,
}
"""How texts are cut before merging, by `tokenizer.ggml.pre`: by GPT-2's expression, after cutting
single digits, or by an expression of its own."""


def _cut(expression: str | None, byte_level: Json) -> Json:
    if expression is None:
        return byte_level
    if expression == "digits":
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    split = {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
        **options,
    }


def _sentence_piece(metadata: Json, tokens: list[str]) -> Json:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise BadGguf("the tokenizer's scores are missing, or not one a token")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, replaced] if prefix else [replaced]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges(tokens, scores),
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Return the pairs that each token is merged from, those of the best token first."""
    if sum(len(token) ** 2 for token in tokens) > _MAX_PAIRS:
        raise BadGguf("the tokenizer's tokens are too long")
    numbers = {token: number for number, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in numbers and right in numbers:
                order = (-score, -len(left), -numbers[left], -numbers[right])
                ranked.append((order, [left, right]))
    ranked.sort(key=lambda pair: pair[0])
    return [pair for _, pair in ranked]


def _beginning(metadata: Json, tokens: list[str], processor: Json | None) -> Json | None:
    """Return what puts the first token before a text, if the model wants one."""
    adds = metadata.get("tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.model"] == "llama")
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if not adds or not isinstance(number, int) or number >= len(tokens):
        return processor
    token = tokens[number]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
