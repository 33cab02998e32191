"""Run in vLLM's environment: grammars after free text allow what the built-in engine's allow.

Walks through random outputs with both. Prints, as JSON, how many masks were compared in each part.
"""

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.follower import GrammarFollower
from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import GrammarSpec, JsonSchemaGrammar, RegexGrammar, SamplingParams
from engine.vllm.grammars import GrammarAfterText

VOCAB_SIZE, END = 2048, 2
SCHEMA = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'


def tokens_of(row: Any) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(each) for each in np.flatnonzero(bits)]


def walk(source: random.Random, compiler: GrammarCompiler, tokenizer: Any) -> Counter[str]:
    """Follow one output with both; return the number of masks compared in each part."""
    grammars: list[GrammarSpec] = [JsonSchemaGrammar(SCHEMA), RegexGrammar("[a-f<]{3,9}")]
    grammar = source.choice(grammars)
    sampling = SamplingParams(
        max_tokens=60,
        seed=1,
        grammar=grammar,
        grammar_after=source.choice(["</think>", "</"]),
        grammar_opening=source.choice(["", "<think>", "<"]),
        grammar_budget=source.choice([0, 5, 20]),
    )
    compiled = compiler.compiled(grammar)
    assert compiled.matcher is not None, compiled.error
    expected = GrammarFollower(compiled, compiler, sampling)
    inner = GuidanceGrammar(compiled.matcher.deep_copy(), compiler.tokenizer(), VOCAB_SIZE)
    tested = GrammarAfterText(inner, sampling, tokenizer, [END])
    text = sampling.grammar_opening if source.random() < 0.7 else ""
    text += source.choice(["so it is", "a < b", ""]) + sampling.grammar_after
    script = tokenizer.encode(text, add_special_tokens=False)
    seen: Counter[str] = Counter()
    output: list[int] = []
    while len(output) < 60 and not expected.ended:
        row = np.full(VOCAB_SIZE // 32, 0xFFFFFFFF, np.uint32)
        row[END // 32] &= ~np.uint32(1 << END % 32)
        expected.fill(row.view(np.int32))
        mask = torch.zeros((2, VOCAB_SIZE // 32), dtype=torch.int32)
        tested.fill_bitmask(mask, 1)
        allowed = tokens_of(row)
        assert tokens_of(mask[1].numpy()) == allowed, f"{sampling} {tokenizer.decode(output)!r}"
        seen[tested._part.name] += 1
        scripted = script[len(output)] if len(output) < len(script) else None
        chosen = scripted if scripted in allowed else source.choice(allowed)
        proposed = [chosen, *source.choices(range(VOCAB_SIZE), k=2)]
        valid = tested.validate_tokens(proposed)
        assert valid == proposed[: len(valid)]
        expected.advance(chosen)
        assert tested.accept_tokens("x", [chosen])
        output.append(chosen)
        count = source.randrange(min(4, len(output)) + 1)
        tested.rollback(count)
        assert tested.accept_tokens("x", output[len(output) - count :])
    return seen


def main() -> None:
    compiler = GrammarCompiler(BUNDLED_MODEL / "tokenizer.json", VOCAB_SIZE, [END])
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += walk(random.Random(seed), compiler, tokenizer)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
