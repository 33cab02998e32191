"""Grammars are compiled once, beside their users, and forgotten in time."""

import gc
import threading
from pathlib import Path

import pytest

from engine.grammar.compiler import MAX_CACHED, MAX_CACHED_BYTES, GrammarCompiler
from engine.shared.messages import JsonSchemaGrammar, LarkGrammar, RegexGrammar


def test_a_grammar_is_compiled_once_for_all_who_ask(
    compiler: GrammarCompiler, settled: threading.Event
) -> None:
    first = compiler.ask(RegexGrammar("[a-z]+"))
    second = compiler.ask(RegexGrammar("[a-z]+"))
    assert first is second
    assert settled.wait(10)
    assert first.settled
    assert first.error is None
    assert first.matcher is not None


def test_nobody_waits_while_a_grammar_is_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = GrammarCompiler.new_matcher

    def held(self: GrammarCompiler, spec: object) -> object:
        begun.set()
        assert go_on.wait(10)
        return original(self, spec)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarCompiler, "new_matcher", held)
    grammar = compiler.ask(RegexGrammar("a"))
    assert begun.wait(10)
    assert not grammar.settled
    go_on.set()
    grammar.wait()
    assert grammar.error is None


def test_what_cannot_be_compiled_says_why_and_is_not_kept(compiler: GrammarCompiler) -> None:
    grammar = compiler.ask(LarkGrammar("start: <|no_such_token|>"))
    grammar.wait()
    assert grammar.matcher is None
    assert grammar.error is not None
    assert "no_such_token" in grammar.error
    del grammar
    gc.collect()
    assert compiler.num_cached == 0


def test_a_grammar_that_allows_nothing_is_an_error(compiler: GrammarCompiler) -> None:
    loop = '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
    grammar = compiler.ask(JsonSchemaGrammar(loop))
    grammar.wait()
    assert grammar.error is not None
    assert "no text fits" in grammar.error


def test_only_the_grammars_used_last_are_kept_once_nobody_uses_them(
    compiler: GrammarCompiler,
) -> None:
    in_use = compiler.ask(RegexGrammar("x"))
    for number in range(MAX_CACHED + 10):
        compiler.ask(RegexGrammar(f"a{number}")).wait()
    gc.collect()
    assert compiler.num_cached == MAX_CACHED + 1
    assert compiler.ask(RegexGrammar("x")) is in_use
    del in_use
    gc.collect()
    assert compiler.num_cached == MAX_CACHED


def test_a_tokenizer_that_does_not_fit_the_model_fails_requests_only(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    compiler = GrammarCompiler(broken, 100)
    try:
        grammar = compiler.ask(RegexGrammar("a"))
        grammar.wait()
        assert grammar.error is not None
    finally:
        compiler.shutdown()


def test_nothing_is_read_before_the_first_grammar(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "missing.json", 100)
    compiler.shutdown()
    assert compiler.num_cached == 0


def test_grammars_that_nobody_uses_are_kept_within_a_number_of_bytes(
    compiler: GrammarCompiler,
) -> None:
    grammars = [compiler.ask(RegexGrammar(f"{number}[a-z]+")) for number in range(4)]
    for each in grammars:
        each.wait()
        assert 0 < each.num_bytes < MAX_CACHED_BYTES
    for each in grammars[1:3]:
        each.num_bytes = MAX_CACHED_BYTES  # as if they were large
    del each, grammars
    compiler.ask(RegexGrammar("one more")).wait()
    gc.collect()
    assert compiler.num_cached == 2, "the newest, and the newest before it, which is small"
