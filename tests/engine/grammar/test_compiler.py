"""Grammars are compiled once, in the background, and evicted from the cache."""

import gc
import json
import threading
import time
from pathlib import Path

import pytest
from llguidance import LLMatcher

from engine.grammar.compiler import MAX_CACHED, MAX_CACHED_BYTES, MAX_HELD_BYTES, GrammarCompiler
from engine.shared.config import BUNDLED_MODEL
from engine.shared.matchers import new_matcher
from engine.shared.messages import JsonSchemaGrammar, LarkGrammar, RegexGrammar
from tests.engine.grammar.conftest import EOS, VOCAB_SIZE
from tests.support.waiting import until


def until_cached(compiler: GrammarCompiler, number: int) -> None:
    """Wait for this cache size, because threads release a grammar only after settling it."""
    until(lambda: gc.collect() >= 0 and compiler.num_cached == number, f"{number} are kept")


def test_a_grammar_is_compiled_once_for_all_requests(
    compiler: GrammarCompiler, settled: threading.Semaphore
) -> None:
    first = compiler.request(RegexGrammar("[a-z]+"))
    second = compiler.request(RegexGrammar("[a-z]+"))
    assert first is second
    assert settled.acquire(timeout=60)
    assert first.settled
    assert first.error is None
    assert first.matcher is not None


def test_uncompilable_grammar_reports_reason_and_is_not_cached(compiler: GrammarCompiler) -> None:
    grammar = compiler.request(LarkGrammar("start: <|no_such_token|>"))
    grammar.wait()
    assert grammar.matcher is None
    assert grammar.error is not None
    assert "no_such_token" in grammar.error
    del grammar
    until_cached(compiler, 0)


def test_a_grammar_that_allows_nothing_is_an_error(compiler: GrammarCompiler) -> None:
    loop = '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
    grammar = compiler.request(JsonSchemaGrammar(loop))
    grammar.wait()
    assert grammar.error is not None
    assert "no text fits" in grammar.error


def test_only_recently_used_grammars_stay_cached(
    compiler: GrammarCompiler,
) -> None:
    in_use = compiler.request(RegexGrammar("x"))
    for number in range(MAX_CACHED + 10):
        compiler.request(RegexGrammar(f"a{number}")).wait()
    until_cached(compiler, MAX_CACHED + 1)
    assert compiler.request(RegexGrammar("x")) is in_use
    del in_use
    until_cached(compiler, MAX_CACHED)


def test_unsuitable_tokenizer_fails_only_requests(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    compiler = GrammarCompiler(broken, 100)
    try:
        grammar = compiler.request(RegexGrammar("a"))
        grammar.wait()
        assert grammar.error is not None
    finally:
        compiler.shutdown()


def test_cache_of_unused_grammars_is_bounded_in_bytes(
    compiler: GrammarCompiler,
) -> None:
    grammars = [compiler.request(RegexGrammar(f"{number}[a-z]+")) for number in range(4)]
    for each in grammars:
        each.wait()
        assert 0 < each.num_bytes < MAX_CACHED_BYTES
    for each in grammars[1:3]:
        each.num_bytes = MAX_CACHED_BYTES  # as if they were large
    del each, grammars
    compiler.request(RegexGrammar("one more")).wait()
    until_cached(compiler, 2)  # the newest, and the newest before it, which is small


def test_grammar_compilation_is_bounded_by_memory(
    compiler: GrammarCompiler, settled: threading.Semaphore
) -> None:
    cached = compiler.request(RegexGrammar("nobody uses it"))
    large = compiler.request(RegexGrammar("[a-z]+"))
    for _ in range(2):
        assert settled.acquire(timeout=60)
    large.num_bytes = MAX_HELD_BYTES + 1  # as if it were large
    del cached
    waiting = compiler.request(RegexGrammar("[0-9]+"))
    assert not settled.acquire(timeout=0.2), "it waits for room"
    until(
        lambda: gc.collect() >= 0 and compiler.held_bytes == MAX_HELD_BYTES + 1,
        "what nobody uses is forgotten first",
    )
    del large
    assert settled.acquire(timeout=60), "the request that used the large one has ended"
    assert waiting.error is None


def test_required_recompilation_does_not_wait_for_room(
    compiler: GrammarCompiler,
) -> None:
    large = compiler.request(RegexGrammar("[a-z]+"))
    large.wait()
    large.num_bytes = MAX_HELD_BYTES + 1
    assert compiler.compiled(RegexGrammar("[0-9]+")).error is None


def test_grammars_can_name_tokens_of_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = (BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    known = {token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    described = {str(VOCAB_SIZE): {"content": "<|tool|>", "special": True}}
    described[str(min(known))] = {"content": "<|known|>", "special": True}
    config = json.dumps({"added_tokens_decoder": described})
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", VOCAB_SIZE + 1, EOS)
    try:
        grammar = compiler.request(LarkGrammar("start: <|tool|>"))
        grammar.wait()
        assert grammar.error is None
        assert compiler.tokens_of("<|tool|>") == (VOCAB_SIZE,)
    finally:
        compiler.shutdown()


def test_one_tenants_slow_grammars_leave_a_thread_for_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, original = threading.Event(), GrammarCompiler.new_matcher

    def held(self: GrammarCompiler, spec: RegexGrammar) -> object:
        assert not spec.pattern.startswith("slow") or go_on.wait(60)
        return original(self, spec)

    monkeypatch.setattr(GrammarCompiler, "new_matcher", held)
    slow = [compiler.request(RegexGrammar(f"slow{number}"), tenant=1) for number in range(8)]
    for number in range(3):
        compiler.request(RegexGrammar(f"a{number}"), tenant=2).wait()
    assert not any(each.settled for each in slow)
    go_on.set()
    for each in slow:
        each.wait()


def test_slow_mask_times_out(compiler: GrammarCompiler) -> None:
    options = '("a")? ' * 9900
    matcher = new_matcher(compiler.tokenizer(), LLMatcher.grammar_from_lark(f"start: {options}"))
    started_at = time.thread_time()
    for token in compiler.tokens_of("aa"):
        matcher.compute_bitmask()
        matcher.consume_token(token)
    matcher.compute_bitmask()
    assert matcher.is_error()
    assert time.thread_time() - started_at < 10
