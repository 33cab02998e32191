"""The tokenizer of a GGUF file, as a Hugging Face tokenizer.json."""

from typing import Any

from engine.shared.gguf.reader import BadGguf

_CONTROL, _USER_DEFINED = 3, 4
_MAX_TOKENS = 1 << 21
_MAX_PAIRS = 1 << 27
"""Maximum sum of squared token lengths, which bounds the candidate merges of a hostile
vocabulary."""

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("SUFFIX", "").replace("DIGITS", r"\p{N}")
_GPT_4O = _CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's replacement for a space."""

Json = dict[str, Any]


def tokenizer_of(metadata: Json) -> Json:
    """Return the content of tokenizer.json.

    Raises:
        BadGguf: the tokenizer is missing, unsupported or inconsistent.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise BadGguf("the tokenizer has duplicate tokens")
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
        "post_processor": _template(metadata, tokens),
    }


def special_tokens(metadata: Json) -> dict[str, str]:
    """Return the texts of the named special tokens, for tokenizer_config.json."""
    tokens = _strings(metadata, "tokens")
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {}
    for gguf_name, own_name in names.items():
        number = _token_id(metadata, gguf_name, tokens)
        if number is not None:
            found[f"{own_name}_token"] = tokens[number]
    return found


def _strings(metadata: Json, name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BadGguf(f"the file has no tokenizer.ggml.{name}: it holds no tokenizer")
    if not found or len(found) > _MAX_TOKENS:
        raise BadGguf(f"the number of tokenizer.ggml.{name}, {len(found)}, is out of range")
    return found


def _token_id(metadata: Json, name: str, tokens: list[str]) -> int | None:
    """Return the id of a named special token, None if the file does not define it.

    Raises:
        BadGguf: the id is out of range.
    """
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise BadGguf(f"tokenizer.ggml.{name}_token_id {number!r} is no token of {len(tokens)}")
    return number


def _added(metadata: Json, tokens: list[str]) -> list[Json]:
    """Return the added tokens, which are matched in texts before pre-tokenization."""
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
            raise BadGguf(f"the tokenizer merges {merge[:3]} to something that is not a token")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _CUTS:
        raise BadGguf(f"the pre-tokenizer {pre!r} is not supported; supported: {', '.join(_CUTS)}")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    return {
        "normalizer": {"type": "NFC"} if pre in ("qwen2", "command-r") else None,
        "pre_tokenizer": _cut(_CUTS[pre], byte_level),
        "decoder": byte_level,
        "model": _bpe(tokens, merges, ignore_merges=pre in _WHOLE_WORDS),
    }


_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2"), ()),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), ("digits",)),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), (_LLAMA_3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA_3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN_2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT_4O,)),
    "tekken": (_TEKKEN,),
    "deepseek-v3": _DEEPSEEK_3,
}
"""Pre-tokenization, by `tokenizer.ggml.pre`: GPT-2's expression, GPT-2's after splitting single
digits, or other expressions applied in sequence."""
_WHOLE_WORDS = ("llama-bpe", "llama-v3", "llama3", "tekken")
"""Those that look up whole words before merging, and prepend a BOS token by default."""


def _cut(expressions: tuple[str, ...], byte_level: Json) -> Json:
    if not expressions:
        return byte_level
    if expressions == ("digits",):
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in expressions
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {**byte_level, "use_regex": False}]}


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
        raise BadGguf("the tokenizer's scores are missing, or not one per token")
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
    unknown = _token_id(metadata, "unknown", tokens)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges(tokens, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Return the merges that produce each token, in order of the tokens' scores."""
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


def _template(metadata: Json, tokens: list[str]) -> Json | None:
    """Return the post-processor that adds BOS and EOS by llama.cpp's rules, None if neither."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    begins = kind == "llama" or pre in _WHOLE_WORDS
    begins = metadata.get("tokenizer.ggml.add_bos_token", begins)
    names = {"bos": begins, "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    added = {
        name: number
        for name, is_added in names.items()
        if is_added and (number := _token_id(metadata, name, tokens)) is not None
    }
    if not added:
        return None

    def sequence(*texts: Json) -> list[Json]:
        first, last = (
            [{"SpecialToken": {"id": tokens[added[name]], "type_id": 0}}] if name in added else []
            for name in names
        )
        return [*first, *texts, *last]

    one, other = ({"Sequence": {"id": each, "type_id": i}} for i, each in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": sequence(one),
        "pair": sequence(one, other),
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in added.values()
        },
    }
