"""Sequences of one request share its long lists."""

from typing import Any

import msgspec
import pytest

from engine.core.front_ends import FrontEnds
from engine.shared.messages import AddRequest, RegexGrammar, SamplingParams, encode

LISTS: dict[str, Any] = {
    "stop_token_ids": tuple(range(1000, 2000)),
    "logit_bias": {token: 1.0 for token in range(1000)},
    "allowed_token_ids": tuple(range(5000)),
    "bad_words": tuple((7, token) for token in range(1000)),
    "grammar": RegexGrammar("x" * 1000),
}


def arrived(id: int, front_end: int = 0, **sampling: Any) -> AddRequest:
    """Return a freshly decoded message, which shares no objects with others."""
    params = SamplingParams(max_tokens=5, seed=id, **sampling)
    message = AddRequest(id, str(id), front_end, 0, [1, 2], params)
    return msgspec.msgpack.decode(encode(message), type=AddRequest)


def shared(front_ends: FrontEnds, message: AddRequest) -> AddRequest:
    restored = front_ends.restored(message)
    assert restored is not None
    return restored


@pytest.fixture
def front_ends() -> FrontEnds:
    made = FrontEnds()
    made.joined(0, 1)
    made.joined(1, 1)
    return made


def test_sequences_of_a_request_share_its_lists(front_ends: FrontEnds) -> None:
    messages = [arrived(id, **LISTS) for id in range(50)]
    held = [shared(front_ends, message) for message in messages]
    assert held == messages
    for name in LISTS:
        assert len({id(getattr(each.sampling, name)) for each in held}) == 1
    assert [each.sampling.seed for each in held] == list(range(50))


def test_differing_parameters_are_not_shared(front_ends: FrontEnds) -> None:
    first = shared(front_ends, arrived(1, **LISTS))
    other = arrived(2, **{**LISTS, "stop_token_ids": (1,), "allowed_token_ids": None})
    second = shared(front_ends, other)
    assert second == other
    assert second.sampling.bad_words is first.sampling.bad_words
    assert second.sampling.stop_token_ids == (1,)
    stranger = arrived(3, front_end=1, **LISTS)
    assert shared(front_ends, stranger) is stranger
    plain = arrived(4)
    assert shared(front_ends, plain) is plain
    again = arrived(5, **LISTS)
    assert shared(front_ends, again) is again, "what nobody holds any more is not kept"
    front_ends.left(0)
    front_ends.joined(0, 1)
    anew = arrived(6, **LISTS)
    assert shared(front_ends, anew) is anew
