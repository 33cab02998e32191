"""Requests with images go to supporting engines, equal images to the same one."""

from collections.abc import Sequence

import msgspec

from engine.shared.messages import AddRequest, EncoderInput, EngineSetup
from server.router.request import RoutedRequest
from server.router.routing import AFFINITY_BLOCK, EngineLoad, PrefixAffinity
from tests.server.router.fake_cluster import GREEDY, SETUP, Cluster


def image(digest: bytes = b"0123456789abcdef", position: int = 0) -> EncoderInput:
    return EncoderInput(
        position=position, num_tokens=1, digest=digest, height=1, width=1, pixels=b"rgb"
    )


SEES = msgspec.structs.replace(SETUP, images=True)


def some_see(*ranks: int, seeing: Sequence[int], setup: EngineSetup = SEES) -> Cluster:
    """Return a cluster in which only some engines support images."""
    cluster = Cluster()
    for rank in ranks:
        cluster.start(rank, setup if rank in seeing else SETUP)
    return cluster


def test_request_with_image_goes_to_engine_with_vision() -> None:
    cluster = some_see(0, 1, 2, seeing=[1])
    for name in ("a", "b", "c"):
        cluster.submit(name, encoder_inputs=[image()])
    assert [len(cluster.engines[rank].held) for rank in (0, 1, 2)] == [0, 3, 0]
    assert cluster.router.members.serves_images
    cluster.submit("text")
    assert len(cluster.engines[1].held) == 3


def test_an_image_moves_with_its_request_to_the_next_engine() -> None:
    cluster = some_see(0, 1, 2, seeing=[1, 2])
    cluster.submit("a", encoder_inputs=[image()])
    first = next(e for e in cluster.engines.values() if e.held)
    cluster.die(first)
    (second,) = [e for e in cluster.engines.values() if e.held]
    assert second.rank == ({1, 2} - {first.rank}).pop()
    (message,) = second.held.values()
    assert message.encoder_inputs == [image()]


def test_engines_report_whether_they_resize_images() -> None:
    resizing = msgspec.structs.replace(SEES, whole_images=True)
    assert not some_see(0, seeing=[0]).router.members.needs_original_images
    assert some_see(0, seeing=[0], setup=resizing).router.members.needs_original_images


def test_request_with_image_waits_for_engine_with_vision() -> None:
    cluster = some_see(0, seeing=[])
    assert not cluster.router.members.serves_images
    cluster.submit("a", encoder_inputs=[image()])
    assert not cluster.engines[0].held
    cluster.start(1, SEES)
    assert len(cluster.engines[1].held) == 1


def routed(*inputs: EncoderInput) -> RoutedRequest:
    tokens = [7] * (2 * AFFINITY_BLOCK)
    return RoutedRequest(AddRequest(1, "a", 0, 0, tokens, GREEDY, encoder_inputs=list(inputs)))


def test_prompts_share_prefix_only_with_equal_images() -> None:
    policy = PrefixAffinity()
    loads = [EngineLoad(rank, 0, 0, 0, 0.0) for rank in range(4)]
    cat, dog = image(b"c" * 16), image(b"d" * 16)
    policy.choose(loads, routed(cat).shown_token_ids)
    assert policy.choose(loads, routed(cat).shown_token_ids).reason == "prefix"
    assert policy.choose(loads, routed(dog).shown_token_ids).reason == "prefix_hash"
    assert policy.choose(loads, routed().shown_token_ids).reason == "prefix_hash"


def test_later_image_does_not_change_earlier_prefix() -> None:
    later = image(position=AFFINITY_BLOCK)
    shown, plain = routed(later).shown_token_ids, routed().shown_token_ids
    assert shown[:AFFINITY_BLOCK] == plain[:AFFINITY_BLOCK]
    assert shown[AFFINITY_BLOCK] != plain[AFFINITY_BLOCK]
