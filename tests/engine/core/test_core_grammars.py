"""Requests with grammars in an engine: non-blocking compilation, conformance, cleanup."""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.core.engine_core import EngineCore
from engine.core.events import PrerequisitesSettled
from engine.executor.simulated import SimulatedExecutor
from engine.grammar import compiler, mask_threads
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.follower import TOO_SLOW, GrammarFollower
from engine.grammar.masks import GrammarTable, grammar_table
from engine.scheduler import request_table
from engine.scheduler.step_costs import StepCosts
from engine.shared.config import (
    BUNDLED_MODEL,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    GrammarSpec,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
    RequestOutput,
    SamplingParams,
)
from tests.support.checked_executor import CheckedExecutor
from tests.support.waiting import PATIENCE

TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
EOS = (2, 0)
WORDS = RegexGrammar("[a-z]{2,9}( [a-z]{2,9}){2,5}")


class Engine:
    """A core with a checking simulated executor, and the outputs of its requests."""

    def __init__(self, *, overlap: bool = False, blocks: int = 64, **scheduling: Any) -> None:
        limits = {"max_num_seqs": 6, "max_num_batched_tokens": 24} | scheduling
        config = EngineConfig(
            model=ModelConfig(max_model_len=200),
            cache=CacheConfig(block_size=4, num_kv_blocks=blocks),
            scheduler=SchedulerConfig(async_scheduling=overlap, **limits),
        )
        table = grammar_table(Path(BUNDLED_MODEL), 2048, EOS)
        assert table is not None
        self.grammars: GrammarTable = table
        self.settled = threading.Event()
        table.on_settled = self.settled.set
        self.executor = CheckedExecutor(
            config,
            vocab_size=2048,
            eos_token_ids=EOS,
            grammars=table,
        )
        self.core = EngineCore(config, self.executor, rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)
        self.tokens: dict[int, list[int]] = {}
        self.last: dict[int, RequestOutput] = {}

    def add(
        self,
        id: int,
        spec: GrammarSpec | None = None,
        *,
        length: int = 5,
        output: list[int] | None = None,
        priority: int = 0,
        prompt_of: int | None = None,
        **sampling: Any,
    ) -> None:
        fields = {"max_tokens": 60, "seed": id, "grammar": spec} | sampling
        first = id if prompt_of is None else prompt_of
        prompt = [3 + (first + i) % 500 for i in range(length)]
        self.tokens[id] = []
        self.core.handle(
            AddRequest(id, f"r{id}", 0, 0, prompt, SamplingParams(**fields), output or [], priority)
        )

    def step(self) -> None:
        for output in self.core.step().outputs.get(0, []):
            assert output.id not in self.last
            self.tokens[output.id] += output.token_ids
            if output.finish_reason is not None:
                assert (output.timing is not None) == bool(output.token_ids)
                self.last[output.id] = output

    def wait(self) -> None:
        """Wait until a grammar is compiled or has failed, like an engine's loop on its inbox."""
        assert self.settled.wait(60)
        self.settled.clear()
        self.core.handle(PrerequisitesSettled())

    def run(self) -> None:
        while self.core.has_requests:
            if self.settled.is_set() or not self.core.has_work:
                self.wait()
            else:
                self.step()

    def text(self, id: int) -> str:
        kept = [token_id for token_id in self.tokens[id] if token_id not in EOS]
        return str(TOKENIZER.decode(kept))

    def assert_nothing_is_left(self) -> None:
        stats = self.core.stats()
        assert (stats.waiting, stats.running, stats.kv_usage) == (0, 0, 0.0)
        assert stats.queued_prefill_tokens == 0
        assert not self.grammars._followers


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Engine] = []

    def build(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield build
    for engine in made:
        engine.executor.shutdown()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block compilations until the event is set."""
    go_on = threading.Event()
    original = GrammarCompiler.new_matcher

    def wait_first(self: GrammarCompiler, spec: GrammarSpec) -> object:
        assert go_on.wait(60)
        return original(self, spec)

    monkeypatch.setattr(GrammarCompiler, "new_matcher", wait_first)
    yield go_on
    go_on.set()


def test_request_without_room_for_grammar_can_be_retried(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_WAIT", 0.01)
    monkeypatch.setattr(GrammarCompiler, "held_bytes", compiler.MAX_HELD_BYTES + 1)
    engine = make()
    engine.add(1, WORDS)
    engine.add(2)
    while 1 not in engine.last:
        engine.wait()
        engine.step()
    assert engine.last[1].finish_reason == "error"
    assert (engine.last[1].no_room, engine.last[1].refused) == (True, False)
    monkeypatch.undo()
    engine.add(3, WORDS)
    engine.run()
    assert re.fullmatch(WORDS.pattern, engine.text(3))
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_of_a_request_with_a_grammar_counts_as_one(
    make: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    counts = []
    monkeypatch.setattr(
        StepCosts, "observe", lambda *args, num_masked, **options: counts.append((args, num_masked))
    )
    engine = make(overlap=overlap)
    engine.add(1, WORDS)
    engine.run()
    engine.step()
    rows = [(args[1] + bool(args[2]), masked) for args, masked in counts]
    assert set(rows) <= {(0, 0), (1, 1)}, "nor is its last step one of plain rows"
    assert (1, 1) in rows
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("drafts", [0, 4])
def test_answers_reach_no_dead_end_of_schema(make: Any, drafts: int) -> None:
    """Nor with draft tokens, which are checked before they are sampled."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}},
        "patternProperties": {"^score$": {}},
        "required": ["score"],
        "additionalProperties": False,
    }
    engine = make(speculative_ngram=drafts)
    spec = JsonSchemaGrammar(json.dumps(schema), whitespace="")
    for id in range(1, 9):
        engine.add(id, spec, prompt_of=1)
        engine.run()
        assert (engine.last[id].finish_reason, engine.last[id].error) == ("stop", None)
        assert re.fullmatch(r'\{"score":[0-9]\}', engine.text(id)), engine.text(id)
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_requests_continue_while_a_grammar_is_compiled(
    make: Any, held: threading.Event, policy: str
) -> None:
    engine = make(scheduling_policy=policy)
    engine.add(1, WORDS, priority=-5)
    assert not engine.core.has_work, "nothing to step for yet: the loop may sleep"
    assert engine.core.has_requests
    engine.add(2, None, max_tokens=4)
    while engine.core.has_work:
        engine.step()
    assert engine.last[2].finish_reason == "length"
    stats = engine.core.stats()
    assert (stats.waiting, stats.deferred) == (1, 1)
    held.set()
    engine.wait()
    assert engine.core.has_work
    stats = engine.core.stats()
    assert (stats.waiting, stats.deferred) == (1, 0)
    engine.run()
    assert engine.last[1].finish_reason == "stop"
    assert re.fullmatch(WORDS.pattern, engine.text(1))
    engine.assert_nothing_is_left()
    engine.add(3, WORDS)
    stats = engine.core.stats()
    assert (stats.counters.grammar_requests, stats.counters.grammar_waits) == (2, 1)
    engine.run()


def test_requests_are_admitted_in_the_order_in_which_they_became_ready(
    make: Any, held: threading.Event
) -> None:
    engine = make(max_num_seqs=1)
    engine.add(1, WORDS)
    engine.add(2, None, max_tokens=3)
    engine.step()
    held.set()
    engine.wait()
    engine.add(3, None, max_tokens=3)
    engine.run()
    assert list(engine.last) == [2, 1, 3]


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(
    make: Any, held: threading.Event
) -> None:
    engine = make()
    engine.add(1, WORDS)
    engine.core.handle(AbortRequests([1]))
    assert not engine.core.has_requests
    engine.assert_nothing_is_left()
    held.set()
    engine.wait()
    assert not engine.core.has_work
    engine.add(2, WORDS)
    engine.run()
    assert engine.last[2].finish_reason == "stop"


def test_waiting_requests_of_departed_front_end_are_dropped(
    make: Any, held: threading.Event
) -> None:
    engine = make()
    engine.add(1, WORDS)
    engine.core.front_end_left(0)
    assert not engine.core.has_requests
    engine.assert_nothing_is_left()
    held.set()


def test_uncompilable_grammar_fails_only_its_requests(make: Any) -> None:
    engine = make()
    for id in (1, 2):
        engine.add(id, LarkGrammar("start: <|nothing|>"))
    engine.add(3, None, max_tokens=2)
    engine.run()
    for id in (1, 2):
        assert engine.last[id].finish_reason == "error"
        assert "cannot be compiled" in (engine.last[id].error or "")
    assert engine.last[3].finish_reason == "length"
    engine.assert_nothing_is_left()


def test_an_engine_without_tokenizer_refuses_grammars() -> None:
    config = EngineConfig()
    core = EngineCore(config, SimulatedExecutor(config, timing="virtual"), rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    core.handle(AddRequest(1, "r", 0, 0, [1], SamplingParams(max_tokens=3, seed=0, grammar=WORDS)))
    [output] = core.step().outputs[0]
    assert output.finish_reason == "error"
    assert not core.has_work


def test_a_grammar_that_is_too_long_is_refused(make: Any) -> None:
    engine = make()
    engine.add(1, RegexGrammar("a" * 200_000))
    engine.run()
    assert "longer than" in (engine.last[1].error or "")


@pytest.mark.parametrize("after", ["", "e"])
def test_other_engine_continues_grammar_from_any_token(make: Any, after: str) -> None:
    sampling: dict[str, Any] = {"seed": 7, "grammar_after": after, "max_tokens": 150}
    first = make()
    first.add(0, WORDS, prompt_of=7, **sampling)
    first.run()
    whole = first.tokens[0]
    other = make()
    for known in range(1, len(whole)):
        other.add(known, WORDS, prompt_of=7, output=whole[:known], **sampling)
    other.run()
    for known in range(1, len(whole)):
        assert other.tokens[known] == whole[known:]
        assert other.last[known].finish_reason == first.last[0].finish_reason == "stop"
    other.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True, "scheduling_policy": "priority"},
        {"speculative_ngram": 8, "scheduling_policy": "priority", "prompt_lookup_min": 1},
    ],
    ids=str,
)
def test_preemption_chunks_overlap_and_drafts_change_no_output(
    make: Any, options: dict[str, Any]
) -> None:
    specs: list[GrammarSpec | None] = [
        None,
        WORDS,
        RegexGrammar("[0-9]{1,30}"),
        LarkGrammar('start: "<" /[a-z]+/ ">" start?'),
        RegexGrammar("(ab|ba){5,40}"),
    ]
    rng = random.Random(5)
    requests = []
    for id in range(24):
        length, spec = rng.randint(1, 60), rng.choice(specs)
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 40)}
        if rng.random() < 0.3:
            sampling["min_tokens"] = min(10, sampling["max_tokens"])
        if rng.random() < 0.3:
            sampling["logprobs"] = 2
        if rng.random() < 0.3:
            sampling["grammar_after"] = "a"
        requests.append((id, spec, length, sampling, rng.randint(0, 3)))
    engine = make(blocks=30, **options)
    for id, spec, length, sampling, priority in requests:
        engine.add(id, spec, length=length, priority=priority, **sampling)
        if id % 3 == 0 and engine.core.has_work:
            engine.step()
    engine.run()
    assert engine.core.stats().counters.preemptions > 0
    if "speculative_ngram" in options:
        assert engine.core.stats().counters.spec_accepted_tokens > 0
    engine.assert_nothing_is_left()
    for id, spec, length, sampling, _ in requests:
        lonely = make()
        lonely.add(id, spec, length=length, **sampling)
        lonely.run()
        assert engine.tokens[id] == lonely.tokens[id]
        assert engine.last[id].finish_reason == lonely.last[id].finish_reason


EXPLODING = LarkGrammar("start: /[a-z ,.;A-Z]*[aeiou][a-z ,.;A-Z]{60}/")
"""Every token leads to states that no other text has led to."""


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.shared.matchers._LEXER_STATES", 8000)


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the compiling threads, in order."""
    names: list[str] = []
    original = GrammarCompiler.new_matcher

    def recorded(self: GrammarCompiler, spec: GrammarSpec) -> object:
        names.append(threading.current_thread().name)
        return original(self, spec)

    monkeypatch.setattr(GrammarCompiler, "new_matcher", recorded)
    return names


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"speculative_ngram": 3, "prompt_lookup_min": 1}], ids=str
)
def test_a_grammar_at_its_limit_is_recompiled_in_parallel_with_steps(
    make: Any, options: dict[str, Any], compiled_by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make(max_num_seqs=8, blocks=200, **options)
    for id in range(6):
        reference.add(id, EXPLODING, max_tokens=50)
    reference.run()
    monkeypatch.setattr("engine.shared.matchers._LEXER_STATES", 20000)
    before = len(compiled_by)
    engine = make(max_num_seqs=8, blocks=200, **options)
    for id in range(6):
        engine.add(id, EXPLODING, max_tokens=50)
    engine.add(9, None, max_tokens=50, ignore_eos=True)
    engine.run()
    assert len(compiled_by) > before + 1, "the limit was never reached"
    assert all(name.startswith("grammar") for name in compiled_by), "a step compiled"
    for id in range(6):
        assert engine.tokens[id] == reference.tokens[id]
        assert engine.last[id].finish_reason == reference.last[id].finish_reason
    assert engine.last[9].finish_reason == "length"
    engine.assert_nothing_is_left()


def test_other_requests_continue_while_a_grammar_at_its_limit_is_recompiled(
    make: Any, few_states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    go_on.set()
    original = GrammarCompiler.new_matcher

    def held(self: GrammarCompiler, spec: GrammarSpec) -> object:
        assert go_on.wait(60)
        return original(self, spec)

    monkeypatch.setattr(GrammarCompiler, "new_matcher", held)
    engine = make(blocks=200)
    engine.add(1, EXPLODING, max_tokens=150)
    engine.wait()
    go_on.clear()
    while engine.core.has_work:
        engine.step()
    assert 1 not in engine.last, "it waits for its grammar"
    assert engine.core.stats().waiting == 1
    engine.add(2, None, max_tokens=10, ignore_eos=True)
    while engine.core.has_work:
        engine.step()
    assert engine.last[2].finish_reason == "length"
    go_on.set()
    engine.run()
    assert 1 in engine.last
    engine.assert_nothing_is_left()


def test_grammar_without_progress_ends_only_its_request(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.shared.matchers._LEXER_STATES", 400)
    for overlap in (False, True):
        engine = make(overlap=overlap, blocks=200)
        for id in range(4):
            engine.add(id, EXPLODING, max_tokens=150)
        engine.add(9, None, max_tokens=40, ignore_eos=True)
        engine.run()
        assert {engine.last[id].finish_reason for id in range(4)} <= {"error", "stop"}
        assert "too many states" in (engine.last[0].error or "")
        assert engine.last[9].finish_reason == "length"
        engine.assert_nothing_is_left()


def test_aborted_requests_waiting_for_recompiled_grammar_leave_nothing(
    make: Any, few_states: None
) -> None:
    rng = random.Random(3)
    for overlap in (False, True):
        engine = make(overlap=overlap, blocks=150)
        for id in range(30):
            engine.add(id, EXPLODING if id % 3 else None, max_tokens=100)
            for _ in range(rng.randint(5, 30)):
                if engine.settled.is_set() or not engine.core.has_work:
                    if not engine.core.has_requests:
                        break
                    engine.wait()
                else:
                    engine.step()
            engine.core.handle(AbortRequests([rng.randint(0, id)]))
        engine.run()
        engine.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": (7, 8)}, "allowed_token_ids"),
        ({"bad_words": ((9,),), "logit_bias": {3: 1.0}}, "bad_words"),
        ({"logit_bias": {3: -100.0}}, "logit_bias"),
        ({}, None),
    ],
    ids=str,
)
def test_the_error_names_the_field_that_excludes_all_tokens_of_the_grammar(
    make: Any, fields: dict[str, Any], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    draws = engine.executor._draw
    monkeypatch.setattr(
        engine.executor, "_draw", lambda state, proposed, choices: draws(state, proposed, [])
    )
    engine.add(1, RegexGrammar("[0-9]{9}"), **fields)
    engine.run()
    last = engine.last[1]
    assert (last.finish_reason, last.refused, last.error_param) == ("error", True, param)
    assert "cannot follow its grammar" in (last.error or "")
    engine.assert_nothing_is_left()


class SlowMasks:
    """Masks of one grammar that take a controlled time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spec: GrammarSpec) -> None:
        self.release = threading.Event()
        self.spins = False
        self.num_begun = self.num_asked = 0
        original = GrammarFollower.matcher_for

        def slow(follower: GrammarFollower, proposed: Any) -> Any:
            self.num_asked += follower.grammar.spec == spec
            if follower.grammar.spec == spec and not self.release.is_set():
                self.num_begun += 1
                while self.spins and not self.release.is_set():
                    pass
                self.release.wait(60)
            return original(follower, proposed)

        monkeypatch.setattr(GrammarFollower, "matcher_for", slow)


SLOW = RegexGrammar("[a-z]{3,5}( [a-z]{3,5}){2,4}")
COMBINED = pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"overlap": True, "blocks": 32},
        {"speculative_ngram": 3, "prompt_lookup_min": 1},
    ],
    ids=str,
)


@COMBINED
def test_other_requests_continue_while_a_mask_is_late(
    make: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(request_table, "MAX_LATE", PATIENCE)
    alone = make(**options)
    alone.add(1, SLOW)
    alone.run()
    masks = SlowMasks(monkeypatch, SLOW)
    engine = make(**options)
    engine.add(1, SLOW)
    engine.wait()
    engine.add(2, WORDS)
    engine.wait()
    engine.add(3, max_tokens=100, ignore_eos=True)
    while not masks.num_begun:
        if engine.settled.is_set():
            engine.wait()
        engine.step()
    before = {id: len(engine.tokens[id]) for id in (2, 3)}
    for _ in range(6):
        started_at = time.monotonic()
        engine.step()
        assert time.monotonic() - started_at < 30, "a step waits for a late mask"
        if engine.settled.is_set():
            engine.wait()
    assert len(engine.tokens[3]) > before[3] + 3
    assert 1 not in engine.last
    masks.release.set()
    engine.run()
    assert engine.last[1].error is None
    assert engine.tokens[1] == alone.tokens[1]
    assert re.fullmatch(SLOW.pattern, engine.text(1))
    assert re.fullmatch(WORDS.pattern, engine.text(2))
    engine.assert_nothing_is_left()


def test_late_mask_is_used_when_its_sequence_samples_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "MAX_LATE", PATIENCE)
    monkeypatch.setattr("engine.grammar.masks.KEPT_SECONDS", PATIENCE)
    monkeypatch.setattr(mask_threads, "MAX_SECONDS", PATIENCE)
    slow = SlowMasks(monkeypatch, SLOW)
    slow.spins = True
    engine = make()
    engine.add(1, SLOW)
    engine.add(2, max_tokens=100, ignore_eos=True)
    engine.wait()
    while not slow.num_begun:
        engine.step()
    engine.step()
    slow.release.set()
    while not engine.tokens[1]:
        engine.step()
    assert slow.num_asked == 1
    engine.run()
    assert re.fullmatch(SLOW.pattern, engine.text(1))
    engine.assert_nothing_is_left()


@COMBINED
def test_a_sequence_whose_mask_takes_too_long_ends_with_its_own_error(
    make: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    masks = SlowMasks(monkeypatch, SLOW)
    masks.spins = True
    engine = make(**options)
    engine.add(1, SLOW)
    engine.add(2, WORDS)
    engine.add(3, max_tokens=40, ignore_eos=True)
    engine.add(4, SLOW, prompt_of=1)
    engine.run()
    for id in (1, 4):
        last = engine.last[id]
        assert (last.finish_reason, last.error, last.refused) == ("error", TOO_SLOW, True)
    assert masks.num_begun == 1, "others of this grammar wait for the same thread"
    assert re.fullmatch(WORDS.pattern, engine.text(2))
    assert len(engine.tokens[3]) == 40
    masks.release.set()
    engine.add(5, SLOW)
    engine.run()
    assert re.fullmatch(SLOW.pattern, engine.text(5)), "another one is judged by its own masks"
    engine.assert_nothing_is_left()


def test_a_sequence_whose_masks_are_always_late_ends(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_threads, "MAX_SECONDS", 60.0)
    monkeypatch.setattr(request_table, "MAX_LATE", 0.2)
    masks = SlowMasks(monkeypatch, SLOW)
    engine = make()
    engine.add(1, SLOW)
    engine.run()
    assert "was not ready within" in str(engine.last[1].error)
    masks.release.set()
    engine.assert_nothing_is_left()
