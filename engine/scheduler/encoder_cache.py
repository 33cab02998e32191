"""Decides which images a step encodes, and which embeddings the executor caches.

Steps that compute an image's placeholder tokens need its embeddings. The first such step encodes
the image; its embeddings are cached by digest while there is room, so an image that recurs, or
whose sequence was preempted, is not encoded again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from engine.batch.executor import ExecutorInfo
from engine.scheduler.request import Request
from engine.shared.messages import EncoderInput, EngineCounters


@dataclass(slots=True)
class _Kept:
    """The cached embeddings of an image."""

    num_tokens: int
    step: int
    """Newest step that needs them."""
    users: int = 0
    """Sequences whose computed tokens end within the image."""


@dataclass(slots=True)
class _Pixels:
    """Pixels of an image, shared by all unfinished sequences that contain it."""

    content: bytes
    users: int = 0


class EncoderCache:
    """Decides what to encode, cache and evict, in LRU order.

    Args:
        executor: provides the image sizes.
        step_tokens: maximum image tokens encoded in one step; a single larger image is allowed.
        num_bytes: cache capacity; raised to fit the largest image.
    """

    def __init__(
        self,
        executor: ExecutorInfo,
        counters: EngineCounters,
        *,
        step_tokens: int,
        num_bytes: int,
    ) -> None:
        vision = executor.vision
        largest = 0 if vision is None else vision.max_tokens
        self._keeps_whole = vision is not None and vision.sees_all
        self._patches_per_token = 0 if vision is None else vision.scale_factor**2
        self._step_tokens = step_tokens
        self._max_tokens = max(num_bytes // max(1, executor.embedding_bytes), largest)
        self._counters = counters
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        """Least recently used first."""
        self._num_tokens = 0
        self._staying: set[bytes] = set()
        """Digests that cannot be evicted: used in this step, or partly consumed by a sequence."""
        self._pixels: dict[bytes, _Pixels] = {}
        self._largest = 0
        """Maximum tokens per image since unfinished requests last had none."""
        self._step = 0
        self._left = 0
        """Tokens that can still be encoded in the step being planned."""
        self._encoded: list[EncoderInput] = []
        self._forgotten: list[bytes] = []

    # -- arrival and departure of sequences ------------------------------------------------------

    def come(self, request: Request) -> None:
        """Add a request; its images share pixels that are already held."""
        for place, image in enumerate(request.images):
            pixels = self._pixels.setdefault(image.digest, _Pixels(image.pixels))
            pixels.users += 1
            self._largest = max(self._largest, image.num_tokens)
            if pixels.content == image.pixels:
                request.images[place] = replace(image, pixels=pixels.content)

    def leave(self, request: Request) -> None:
        """Remove a finished request."""
        for image in request.images:
            pixels = self._pixels[image.digest]
            pixels.users -= 1
            if not pixels.users:
                del self._pixels[image.digest]
        if not self._pixels:
            self._largest = 0

    def stop(self, request: Request) -> None:
        """Release the image that a request, which no longer runs, has partly consumed."""
        if request.image is None:
            return
        kept = self._kept[request.image.digest]
        kept.users -= 1
        if not kept.users and kept.step != self._step:
            self._staying.discard(request.image.digest)
        request.image = None

    # -- one step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin planning a step."""
        self._step += 1
        self._left = self._step_tokens
        self._staying = {digest for digest in self._staying if self._kept[digest].users}

    def reach(self, images: Sequence[EncoderInput], start: int, count: int) -> int:
        """Return how many of a sequence's next tokens this step can compute.

        Either `count` tokens from `start` on, or those before the first image that cannot be
        encoded now. `images` must be in order of position.
        """
        staying = sum(self._kept[digest].num_tokens for digest in self._staying)
        left, room, seen = self._left, self._max_tokens - staying, self._staying.copy()
        for image in images:
            if image.position >= start + count:
                break
            if image.position + image.num_tokens <= start or image.digest in seen:
                continue
            needed = 0 if image.digest in self._kept else image.num_tokens
            is_first = left == self._step_tokens
            if (needed > max(0, left) and not is_first) or image.num_tokens > room:
                return max(0, image.position - start)
            left -= needed
            room -= image.num_tokens
            seen.add(image.digest)
        return count

    def must_be_whole(self, request: Request) -> bool:
        """Return whether steps must not end within an image of the request."""
        return self._keeps_whole and bool(request.images)

    def together(self, request: Request, start: int) -> int:
        """Return the minimum number of tokens from `start` on that must be in one step.

        More than 1 within an image whose tokens attend to all of it: the rest of that image.
        """
        if self.must_be_whole(request):
            for image in request.images:
                if image.position <= start < image.position + image.num_tokens:
                    return image.position + image.num_tokens - start
        return 1

    def whole(self, request: Request, count: int) -> int:
        """Return the most next tokens, up to `count`, that do not end within an image."""
        start = request.num_computed_tokens
        for image in request.images:
            if image.position < start + count < image.position + image.num_tokens:
                return max(0, image.position - start)
        return count

    def take(self, request: Request, count: int) -> None:
        """Plan `count` of a sequence's next tokens; at most the result of `reach`."""
        start = request.num_computed_tokens
        end = start + count
        shown = [
            image
            for image in request.images
            if image.position < end and image.position + image.num_tokens > start
        ]
        # Protect cached images first, so that they are not evicted for new ones.
        self._staying.update(image.digest for image in shown if image.digest in self._kept)
        for image in shown:
            self._use(image, goes_on=image is request.image)
        unfinished = next((i for i in shown if i.position + i.num_tokens > end), None)
        if unfinished is not request.image:
            self.stop(request)
            request.image = unfinished
            if unfinished is not None:
                self._kept[unfinished.digest].users += 1

    def take_changes(self) -> tuple[list[EncoderInput], list[bytes]]:
        """Return and clear the images to encode, and the digests evicted before that."""
        encoded, self._encoded = self._encoded, []
        forgotten, self._forgotten = self._forgotten, []
        return encoded, forgotten

    @property
    def max_patches(self) -> int:
        """Maximum patches that the next step encodes; 0 if no unfinished request has images."""
        tokens = max(self._step_tokens, self._largest)
        return tokens * self._patches_per_token if self._pixels else 0

    def reset(self) -> int:
        """Evict all images that no sequence has partly consumed; return their number."""
        unused = [digest for digest, kept in self._kept.items() if not kept.users]
        for digest in unused:
            self._forget(digest)
        return len(unused)

    def _use(self, image: EncoderInput, *, goes_on: bool) -> None:
        """Use an image in this step; `goes_on` if the step before used it for the same request."""
        kept = self._kept.get(image.digest)
        if not goes_on:
            self._counters.encoder_cache_queries += 1
            self._counters.encoder_cache_hits += kept is not None
        if kept is None:
            for digest in [each for each in self._kept if each not in self._staying]:
                if self._num_tokens + image.num_tokens <= self._max_tokens:
                    break
                self._forget(digest)
            kept = self._kept[image.digest] = _Kept(image.num_tokens, self._step)
            self._num_tokens += image.num_tokens
            self._left -= image.num_tokens
            self._encoded.append(image)
            self._counters.encoded_images += 1
        kept.step = self._step
        self._staying.add(image.digest)
        self._kept.move_to_end(image.digest)

    def _forget(self, digest: bytes) -> None:
        self._num_tokens -= self._kept.pop(digest).num_tokens
        self._staying.discard(digest)
        self._forgotten.append(digest)

    def check_integrity(self, requests: Sequence[Request], running: Sequence[Request]) -> None:
        """Raise AssertionError if an entry is leaked or a count is wrong."""
        assert self._num_tokens == sum(each.num_tokens for each in self._kept.values())
        assert self._num_tokens <= self._max_tokens, "more is kept than there is room for"
        in_use = sorted(r.image.digest for r in running if r.image is not None)
        counted = [d for d, kept in self._kept.items() for _ in range(kept.users)]
        assert sorted(counted) == in_use, "users of images are counted wrongly"
        shown = sorted(image.digest for r in requests for image in r.images)
        held = [d for d, pixels in self._pixels.items() for _ in range(pixels.users)]
        assert sorted(held) == shown, "pixels are leaked"
