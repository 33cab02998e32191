"""Slots follow their grammars, and masks allow exactly the valid next tokens."""

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.batch.batch import SlotStart
from engine.grammar import mask_threads
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.follower import TOO_SLOW
from engine.grammar.masks import GrammarTable, TokenMasks
from engine.runner.penalties import forbid_others
from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import (
    ChoiceGrammar,
    GrammarSpec,
    RegexGrammar,
    SamplingParams,
)

TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
EOS = {0, 2}


def tokens(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def start(
    table: GrammarTable,
    slot: int,
    spec: GrammarSpec | None,
    *,
    output: str = "",
    after: str = "",
    **options: Any,
) -> None:
    sampling = SamplingParams(max_tokens=100, seed=0, grammar=spec, grammar_after=after, **options)
    table.start(SlotStart(slot, [5, 6, 7, *tokens(output)], 3, sampling))


def write(table: GrammarTable, slot: int, rng: random.Random) -> str:
    """Sample allowed tokens at random until the grammar ends."""
    drawn: list[int] = []
    for _ in range(200):
        token_id = rng.choice(table.choices([slot])[slot][0])
        drawn.append(token_id)
        ended = table.advance([slot], [token_id]).reasons
        if ended:
            assert ended == {slot: None}
            return str(TOKENIZER.decode([t for t in drawn if t not in EOS]))
    raise AssertionError("the grammar did not end")


def test_rows_without_grammar_have_no_mask(table: GrammarTable) -> None:
    start(table, 0, None)
    start(table, 1, RegexGrammar("a"))
    assert table.masks([0, 2]) is None
    masks = table.masks([0, 1, 2])
    assert masks is not None
    assert masks.rows.tolist() == [1]


def test_output_that_violates_grammar_ends_with_an_error(table: GrammarTable) -> None:
    start(table, 0, RegexGrammar("abc"), output="xyz")
    ended = table.advance([0], [5]).reasons
    assert "cannot follow its grammar" in (ended[0] or "")


def test_end_token_is_allowed_where_grammar_can_end(table: GrammarTable) -> None:
    start(table, 0, RegexGrammar("[0-9]{1,3}"))
    assert not EOS & set(table.choices([0])[0][0])
    assert table.advance([0], tokens("7")).reasons == {}
    assert set(table.choices([0])[0][0]) >= EOS
    assert table.advance([0], [2]).reasons == {0: None}


def test_grammar_without_continuation_ends_at_once(table: GrammarTable) -> None:
    start(table, 0, RegexGrammar("[0-9]"))
    assert table.advance([0], tokens("7")).reasons == {0: None}
    assert table.advance([0], [2]).reasons == {0: None}, "a step in flight may add to it, in vain"


def test_the_grammar_begins_after_its_marker(table: GrammarTable) -> None:
    for output in ("", "let me", "</think no</thi"):
        start(table, 0, ChoiceGrammar(("yes", "no")), after="</think>", output=output)
        allowed = set(table.choices([0])[0][0])
        assert len(allowed) == 2046
        assert not allowed & EOS, "an output without its grammar's part is not complete"
    for token_id in tokens("nk>"):
        assert table.advance([0], [token_id]).reasons == {}
    assert write(table, 0, random.Random(1)) in ("yes", "no")


def test_marker_is_found_in_resumed_output(table: GrammarTable) -> None:
    start(table, 0, ChoiceGrammar(("yes", "no")), after="</think>", output="hm</think>y")
    assert write(table, 0, random.Random(1)) == "es"


def texts(masks: TokenMasks, row: int) -> set[str]:
    allowed = masks.allowed(2048)[masks.rows.tolist().index(row)]
    return {TOKENIZER.decode([token_id]) for token_id in np.flatnonzero(allowed).tolist()}


def test_each_proposed_token_has_its_own_mask(table: GrammarTable) -> None:
    start(table, 4, RegexGrammar("a[bc]d"))
    start(table, 6, RegexGrammar("[0-9]"))
    masks = table.masks([9, 4, 4, 4, 6], {4: tokens("a") + tokens("b")})
    assert masks is not None
    assert masks.rows.tolist() == [1, 2, 3, 4]
    assert "a" in texts(masks, 1)
    assert texts(masks, 2) == {"b", "c"}
    assert texts(masks, 3) == {"d"}
    assert texts(masks, 4) == set("0123456789")
    assert {TOKENIZER.decode([t]) for t in table.choices([4])[4][0]} >= {"a"}, "nothing is consumed"


def test_proposed_tokens_that_violate_grammar_are_rejected(table: GrammarTable) -> None:
    start(table, 4, RegexGrammar("a[bc]d"))
    masks = table.masks([4, 4, 4], {4: tokens("a") + tokens("x")})
    assert masks is not None
    assert texts(masks, 1) == {"b", "c"}
    assert table.advance([4, 4], tokens("a") + tokens("b")).reasons == {}
    masks = table.masks([4, 4, 4], {4: [*tokens("d"), 2]})
    assert masks is not None
    assert texts(masks, 0) == {"d"}
    assert table.advance([4, 4], [*tokens("d"), 2]).reasons == {4: None}


def test_marker_can_be_among_proposed_tokens(table: GrammarTable) -> None:
    start(table, 0, ChoiceGrammar(("yes", "no")), after="<>")
    proposed = [*tokens("<"), *tokens(">"), *tokens("y")]
    masks = table.masks([0] * 4, {0: proposed})
    assert masks is not None
    assert len(texts(masks, 0)) > 100
    assert len(texts(masks, 1)) > 100
    assert texts(masks, 2) <= {"y", "ye", "yes", "n", "no"}
    assert texts(masks, 3) <= {"e", "es"}


def test_slots_are_released(table: GrammarTable) -> None:
    start(table, 0, RegexGrammar("a"))
    start(table, 1, RegexGrammar("b"))
    table.release(0)
    table.release(7)
    assert len(table._followers) == 1
    start(table, 1, None)
    assert not table._followers


class LockReleasedLater:
    """A lock whose holder is interrupted as it releases it."""

    def __init__(self, go_on: threading.Event) -> None:
        self._lock = threading.Lock()
        self._go_on = go_on
        self.acquire, self.locked = self._lock.acquire, self._lock.locked
        self.released = threading.Event()

    def release(self) -> None:
        self._go_on.wait()
        self._lock.release()
        self.released.set()


def test_a_mask_computed_as_its_step_stops_waiting_is_kept(compiler: GrammarCompiler) -> None:
    table = GrammarTable(compiler, vocab_size=2048, eos_token_ids=sorted(EOS))
    spec, go_on = RegexGrammar("a"), threading.Event()
    state = compiler.compiled(spec).state
    lock = LockReleasedLater(go_on)
    state.lock = lock  # type: ignore[assignment]
    try:
        start(table, 0, spec)
        assert table.masks([0]) is not None
        [token_id] = tokens("a")
        assert table.advance([0], [token_id]).stalls == {0: None}
        go_on.set()
        assert lock.released.wait(60)
        start(table, 0, spec)
        assert table.choices([0]) == {0: [[token_id]]}
    finally:
        go_on.set()
        table.shutdown()


def test_masks_report_whether_only_given_tokens_are_allowed() -> None:
    bits = np.zeros((2, 2), np.int32)
    bits[0, 0] = 0b101
    bits[1, 1] = np.uint32(1 << 31).astype(np.int32)
    masks = TokenMasks(np.array([4, 6]), bits)
    assert masks.allows_only(4, np.array([0, 2]))
    assert not masks.allows_only(4, np.array([0, 5]))
    assert masks.allows_only(6, np.array([63]))
    assert not masks.allows_only(5, np.array([0, 2])), "the row has no mask"
    assert not masks.allows_only(9, np.array([0, 2]))
    assert np.flatnonzero(masks.allowed(64)[1]).tolist() == [63]


def test_a_token_that_the_grammar_forbids_is_an_error_and_compiles_nothing(
    table: GrammarTable,
) -> None:
    spec = RegexGrammar("[0-9]{4}")
    start(table, 0, spec)
    shared = table.request(spec)
    ends = table.advance([0], tokens("x"))
    assert "cannot follow its grammar" in (ends.reasons[0] or "")
    assert not ends.stalls
    assert table.request(spec) is shared


THINK = {"after": "</think>", "grammar_opening": "<think>"}
FORM = ChoiceGrammar(("yes", "no", "<no>"))


def test_non_reasoning_answer_follows_grammar_from_start(table: GrammarTable) -> None:
    first = tokens("<think>")[0]
    for seed in range(10):
        start(table, 0, ChoiceGrammar(("yes", "no")), **THINK)
        allowed = set(table.choices([0])[0][0])
        assert allowed == {first} | {t for t in allowed if t != first}
        assert len(allowed) < 10
        rng = random.Random(seed)
        word = ""
        token_id = rng.choice(sorted(allowed - {first}))
        while not table.advance([0], [token_id]).reasons:
            word += TOKENIZER.decode([token_id])
            token_id = rng.choice(table.choices([0])[0][0])
        assert word + TOKENIZER.decode([token_id]) in ("yes", "no")


@pytest.mark.parametrize("known", range(12))
def test_reasoning_is_unconstrained_up_to_end_tag(table: GrammarTable, known: int) -> None:
    """At any point at which another engine takes over."""
    whole = [*tokens("<think>"), *tokens("hm"), *tokens("</think>"), *tokens("yes")]
    form = RegexGrammar("yes|<[0-9]+>")
    start(table, 0, form, **THINK)
    for token_id in whole[:known]:
        assert token_id in table.choices([0])[0][0]
        assert table.advance([0], [token_id]) == ({}, {}, {})
    expected = table.choices([0])
    sampling = SamplingParams(
        max_tokens=100, seed=0, grammar=form, grammar_after="</think>", grammar_opening="<think>"
    )
    table.start(SlotStart(1, [5, *whole[:known]], 1, sampling))
    assert table.choices([1])[1] == expected[0]
    left = whole[known:]
    if left:
        assert len(table.choices([1], {1: left})[1]) == 1 + len(left)
        proposed = table.choices([1], {1: left})[1]
        for place, token_id in enumerate(left):
            assert table.choices([1])[1][0] == proposed[place]
            ends = table.advance([1], [token_id])
        assert ends.reasons == {1: None}


def test_opening_tag_and_grammar_can_share_a_prefix(table: GrammarTable) -> None:
    start(table, 0, FORM, **THINK)
    assert table.advance([0], tokens("<")) == ({}, {}, {})
    allowed = set(table.choices([0])[0][0])
    assert allowed >= {tokens("<think>")[1], tokens("no")[0]}
    for token_id in tokens("no>"):
        ends = table.advance([0], [token_id])
    assert ends.reasons == {0: None}


def test_unended_reasoning_leaves_room_for_grammar(table: GrammarTable) -> None:
    start(table, 0, FORM, after="</think>", grammar_budget=5)
    rng = random.Random(3)
    drawn: list[int] = []
    while True:
        choices = table.choices([0])[0][0]
        token_id = rng.choice([t for t in choices if len(drawn) >= 5 or t > 100])
        drawn.append(token_id)
        if table.advance([0], [token_id]).reasons:
            break
    text = TOKENIZER.decode(drawn)
    assert drawn[5 : 5 + len(tokens("</think>"))] == tokens("</think>")
    assert text.partition("</think>")[2] in ("yes", "no", "<no>")
    start(table, 1, FORM, after="</think>", grammar_budget=5)
    proposed = table.choices([1], {1: drawn[:8]})[1]
    assert proposed[5] == [drawn[5]]
    assert proposed[7] == [drawn[7]]


def test_a_sequence_that_would_end_inside_the_reasoning_ends_the_reasoning(
    table: GrammarTable,
) -> None:
    start(table, 0, FORM, after="]")
    start(table, 1, FORM)
    masks = table.masks([1, 0])
    assert masks is not None
    end = tokens("]")[0]
    assert masks.endings == {1: end}
    logits = torch.zeros(2, 2048)
    logits[1, 2] = 9.0
    forbid_others(logits, masks)
    assert int(logits[1].argmax()) == end
    assert float(logits[1, 2]) == float("-inf")


class HeldMatcher:
    """A matcher whose masks take until the event; as in the library, none else can use it then."""

    def __init__(self, table: GrammarTable, slot: int) -> None:
        follower = table._followers[slot]
        self._matcher: Any = follower._matcher
        follower._matcher = self  # type: ignore[assignment]
        self.go_on = threading.Event()
        self.has_begun = threading.Event()
        self.num_begun = 0
        self._is_borrowed = False

    def unsafe_compute_mask_ptr(self, *args: Any) -> None:
        self.num_begun += 1
        self._is_borrowed = True
        self.has_begun.set()
        while not self.go_on.is_set():
            pass
        self._is_borrowed = False
        self._matcher.unsafe_compute_mask_ptr(*args)

    def __getattr__(self, name: str) -> Any:
        if self._is_borrowed:
            raise RuntimeError("Already mutably borrowed")
        return getattr(self._matcher, name)


def test_mask_that_takes_too_long_is_left_to_its_thread(
    table: GrammarTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_threads, "MAX_SECONDS", 0.001)
    start(table, 0, RegexGrammar("[a-z]*"))
    held = HeldMatcher(table, 0)
    try:
        assert table.masks([0]) is not None
        assert table.advance([0], tokens("a")).reasons == {0: TOO_SLOW}
    finally:
        held.go_on.set()


def test_masks_of_interrupted_step_are_dropped(table: GrammarTable) -> None:
    start(table, 0, RegexGrammar("[a-z]*"))
    start(table, 1, RegexGrammar("[0-9]*"))
    slow, quick = HeldMatcher(table, 0), HeldMatcher(table, 1)
    quick.go_on.set()
    table._followers[1].grammar.state.seconds = 1.0  # the slow one seems the cheaper one
    try:
        assert table.begin([0, 1]) is not None
        assert slow.has_begun.wait(60)
        assert table.masks([0, 1]) is not None
        assert table.advance([1], tokens("7")).reasons == {}
    finally:
        slow.go_on.set()
    table._threads._pool.shutdown(wait=True)
    assert (slow.num_begun, quick.num_begun) == (1, 1)


def test_sequence_whose_mask_cannot_be_computed_ends_with_an_error(table: GrammarTable) -> None:
    for _ in range(8):
        start(table, 0, RegexGrammar("[a-z]*"))
        table._followers[0]._matcher = object()  # type: ignore[assignment]
        start(table, 1, RegexGrammar("[0-9]*"))
        assert table.masks([0, 1]) is not None
        ends = table.advance([0, 1], tokens("a") + tokens("7"))
        assert "cannot be computed" in (ends.reasons[0] or "")
        assert 1 not in ends.stalls
    start(table, 0, RegexGrammar("[a-z]*"))
    assert table.choices([0])[0][0], "others with this grammar are not affected"


SHARED = [RegexGrammar("[a-z]{3}( [0-9]+)?"), RegexGrammar("(ab|ba)*"), FORM, None]


def test_steps_in_any_order_have_the_masks_of_sequences_alone(table: GrammarTable) -> None:
    """With sequences that start and leave at any time, drafts, and interrupted steps."""
    rng = random.Random(4)
    outputs: dict[int, tuple[GrammarSpec, list[int]]] = {}
    alone = 99
    num_compared = 0
    for _ in range(1000):
        for slot in rng.sample(range(6), 2):
            spec = rng.choice(SHARED)
            start(table, slot, spec)
            outputs.pop(slot, None)
            if spec is not None:
                outputs[slot] = (spec, [])
        slots = rng.sample(range(6), rng.randint(1, 6))
        proposed = {
            slot: [rng.choice(tokens("ab yes 01")) for _ in range(rng.randint(1, 3))]
            for slot in slots
            if rng.random() < 0.3
        }
        rows = [slot for slot in slots for _ in range(1 + len(proposed.get(slot, ())))]
        while rng.random() < 0.2:
            table.begin(rows, proposed)  # its step fails
        pending = table.begin(rows, proposed)
        for slot in set(range(6)) - set(slots):
            if rng.random() < 0.3:
                table.release(slot)
                outputs.pop(slot, None)
        assert (pending is None) == outputs.keys().isdisjoint(slots)
        if pending is None:
            continue
        masks = table.finish(pending)
        allowed = masks.allowed(2048)
        drawn = {}
        for slot in outputs.keys() & slots:
            first = masks.rows.tolist().index(rows.index(slot))
            drawn[slot] = int(rng.choice(np.flatnonzero(allowed[first])))
        ends = table.advance(list(drawn), list(drawn.values()))
        for slot, token_id in drawn.items():
            followed, output = outputs[slot]
            if slot not in ends.stalls:
                sampling = SamplingParams(max_tokens=100, seed=0, grammar=followed)
                table.start(SlotStart(alone, [5, *output], 1, sampling))
                matcher = table._followers[alone]._matcher
                assert matcher is not None
                expected = np.zeros(64, np.int32)
                matcher.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
                first = masks.rows.tolist().index(rows.index(slot))
                assert np.array_equal(masks.bits[first], expected)
                output.append(token_id)
                num_compared += 1
            if slot in ends.stalls or slot in ends.reasons:
                table.release(slot)
                del outputs[slot]
    assert num_compared > 500
