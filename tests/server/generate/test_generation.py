from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.shared.messages import RequestOutput, SamplingParams, TokenLogprob
from server.api.completions.schema import CompletionRequest
from server.generate.fold import ChoiceFold, Delta, GenerationFailed, PromptEcho
from server.generate.request import GenerationRequest, Prompt
from server.generate.run import DeltaSum
from server.text.detokenizer import TokenTable
from server.text.tokenizer import ServedTokenizer
from tests.server.tokens import id_of

SCORE = TokenLogprob(-0.5, 1, list(range(20)), [-1.0] * 20)
TEXT = "hello 你好 world 🙂🙂 END of the stream"


def asking(
    *,
    include_stop: bool = False,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    **options: Any,
) -> GenerationRequest:
    fields = CompletionRequest.model_validate(
        {"prompt": "the fox", "include_stop_str_in_output": include_stop}
    )
    sampling = SamplingParams(
        max_tokens=100, seed=0, min_tokens=min_tokens, stop_token_ids=stop_token_ids
    )
    return GenerationRequest(fields=fields, max_model_len=512, sampling=sampling, **options)


def fold_all(
    tokenizer: ServedTokenizer, outputs: list[RequestOutput], *, echo: bool = False, **options: Any
) -> tuple[Delta, ChoiceFold]:
    prompt = Prompt(tokenizer.encode("the fox", add_special_tokens=False), "the fox")
    table = TokenTable(tokenizer)
    fold = ChoiceFold(table, prompt, asking(**options), PromptEcho(table, prompt) if echo else None)
    deltas = []
    for output in outputs:
        deltas.append(fold.push(output))
        if fold.finished:
            break
    total = DeltaSum()
    for delta in deltas:
        total.add(delta)
    return total.whole(), fold


def outputs_of(ids: list[int], cuts: list[int], reason: Any = "length") -> list[RequestOutput]:
    outputs, rest = [], list(ids)
    for cut in [*cuts, len(ids)]:
        part, rest = rest[:cut], rest[cut:]
        scores = [TokenLogprob(-float(i), 1, [i], [-float(i)]) for i in part]
        outputs.append(RequestOutput(1, part, None if rest else reason, logprobs=scores))
        if not rest:
            break
    return outputs


@given(
    cuts=st.lists(st.integers(1, 6), max_size=30),
    stop=st.sampled_from([(), ("END",), ("🙂🙂",), ("world", "wor"), ("好 w",), ("absent",)]),
    include=st.booleans(),
    min_tokens=st.integers(0, 25),
)
def test_arrival_of_tokens_does_not_change_answer(
    tokenizer: ServedTokenizer,
    cuts: list[int],
    stop: tuple[str, ...],
    include: bool,
    min_tokens: int,
) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    options: dict[str, Any] = {
        "stop": stop, "include_stop": include, "min_tokens": min_tokens, "logprobs": 0
    }  # fmt: skip
    one_by_one, first = fold_all(tokenizer, outputs_of(ids, [1] * len(ids)), **options)
    answer, fold = fold_all(tokenizer, outputs_of(ids, cuts), **options)
    assert answer == one_by_one
    assert fold.num_tokens == first.num_tokens == len(answer.token_ids)


@pytest.mark.parametrize("width", [1, 2, 3, 50])
def test_a_stop_string_drops_what_follows_it(tokenizer: ServedTokenizer, width: int) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    answer, fold = fold_all(tokenizer, outputs_of(ids, [width] * len(ids)), stop=("END",))
    assert answer.text == TEXT.partition("END")[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "END")
    upto = tokenizer.decode(ids[: fold.num_tokens], skip_special_tokens=True)
    assert upto.endswith("END")
    assert list(answer.token_ids) == ids[: fold.num_tokens]


def test_stop_strings_wait_for_min_tokens(tokenizer: ServedTokenizer) -> None:
    ids = tokenizer.encode("a stream, a stream", add_special_tokens=False)
    early, _ = fold_all(tokenizer, outputs_of(ids, [1] * 40), stop=("stream",))
    late, _ = fold_all(tokenizer, outputs_of(ids, [1] * 40), stop=("stream",), min_tokens=4)
    assert early.text == "a "
    assert late.text.startswith("a stream, a")


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello<|end|>")])
def test_stop_token_is_counted_and_shown_if_requested(
    tokenizer: ServedTokenizer, include: bool, text: str
) -> None:
    end = id_of(tokenizer.backend, "<|end|>")
    ids = [*tokenizer.encode("hello", add_special_tokens=False), end]
    output = RequestOutput(1, ids, "stop", stop_token_id=end)
    answer, fold = fold_all(
        tokenizer,
        [output],
        include_stop=include,
        skip_special_tokens=False,
        stop_token_ids=(end,),
    )
    assert (answer.text, answer.stop_reason) == (text, end)
    assert fold.num_tokens == len(ids)


def test_offsets_point_at_each_tokens_text(tokenizer: ServedTokenizer) -> None:
    ids = tokenizer.encode("hello world, hello", add_special_tokens=False)
    answer, _ = fold_all(tokenizer, outputs_of(ids, [2] * 20), logprobs=0, echo=True)
    table = TokenTable(tokenizer)
    assert answer.text == "the foxhello world, hello"
    assert answer.logprobs is not None
    assert answer.logprobs[0].logprob is None
    for token in answer.logprobs:
        name = table.name_of(token.token_id)
        assert answer.text[token.text_offset :].startswith(name)


def test_incomplete_character_ends_text_with_one_replacement(tokenizer: ServedTokenizer) -> None:
    ids = [id_of(tokenizer.backend, token) for token in "aðŁ"]
    answer, _ = fold_all(tokenizer, outputs_of(ids, [1, 1, 1]))
    assert answer.text == "a\ufffd"


def test_a_failed_request_raises(tokenizer: ServedTokenizer) -> None:
    with pytest.raises(GenerationFailed, match="out of blocks"):
        fold_all(tokenizer, [RequestOutput(1, [], "error", error="out of blocks")])
