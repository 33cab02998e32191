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
class _CachedImage:
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
        self._is_bidirectional = vision is not None and vision.is_bidirectional
        self._patches_per_token = 0 if vision is None else vision.scale_factor**2
        self._step_tokens = step_tokens
        self._max_tokens = max(num_bytes // max(1, executor.embedding_bytes), largest)
        self._counters = counters
        self._cached: OrderedDict[bytes, _CachedImage] = OrderedDict()
        """Least recently used first."""
        self._num_tokens = 0
        self._pinned: set[bytes] = set()
        """Digests that cannot be evicted: used in this step, or partly consumed by a sequence."""
        self._pixels: dict[bytes, _Pixels] = {}
        self._largest = 0
        """Maximum tokens per image since unfinished requests last had none."""
        self._step = 0
        self._budget = 0
        """Tokens that can still be encoded in the step being planned."""
        self._encoded: list[EncoderInput] = []
        self._evicted: list[bytes] = []

    # -- arrival and departure of sequences ------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request; its images share pixels that are already held."""
        for index, image in enumerate(request.images):
            pixels = self._pixels.setdefault(image.digest, _Pixels(image.pixels))
            pixels.users += 1
            self._largest = max(self._largest, image.num_tokens)
            if pixels.content == image.pixels:
                request.images[index] = replace(image, pixels=pixels.content)

    def remove(self, request: Request) -> None:
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
        cached = self._cached[request.image.digest]
        cached.users -= 1
        if not cached.users and cached.step != self._step:
            self._pinned.discard(request.image.digest)
        request.image = None

    # -- one step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin planning a step."""
        self._step += 1
        self._budget = self._step_tokens
        self._pinned = {digest for digest in self._pinned if self._cached[digest].users}

    def computable_tokens(self, images: Sequence[EncoderInput], start: int, count: int) -> int:
        """Return how many of a sequence's next tokens this step can compute.

        Either `count` tokens from `start` on, or those before the first image that cannot be
        encoded now. `images` must be in order of position.
        """
        pinned = sum(self._cached[digest].num_tokens for digest in self._pinned)
        budget, room, counted = self._budget, self._max_tokens - pinned, self._pinned.copy()
        for image in images:
            if image.position >= start + count:
                break
            if image.position + image.num_tokens <= start or image.digest in counted:
                continue
            needed = 0 if image.digest in self._cached else image.num_tokens
            is_first = budget == self._step_tokens
            if (needed > max(0, budget) and not is_first) or image.num_tokens > room:
                return max(0, image.position - start)
            budget -= needed
            room -= image.num_tokens
            counted.add(image.digest)
        return count

    def needs_whole_images(self, request: Request) -> bool:
        """Return whether steps must not end within an image of the request."""
        return self._is_bidirectional and bool(request.images)

    def min_step_tokens(self, request: Request, start: int) -> int:
        """Return the minimum number of tokens from `start` on that must be in one step.

        More than 1 within an image whose tokens attend to all of it: the rest of that image.
        """
        if self.needs_whole_images(request):
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
        """Plan `count` of a sequence's next tokens; at most the result of `computable_tokens`."""
        start = request.num_computed_tokens
        end = start + count
        images = [
            image
            for image in request.images
            if image.position < end and image.position + image.num_tokens > start
        ]
        # Protect cached images first, so that they are not evicted for new ones.
        self._pinned.update(image.digest for image in images if image.digest in self._cached)
        for image in images:
            self._use(image, continues=image is request.image)
        unfinished = next((i for i in images if i.position + i.num_tokens > end), None)
        if unfinished is not request.image:
            self.stop(request)
            request.image = unfinished
            if unfinished is not None:
                self._cached[unfinished.digest].users += 1

    def take_changes(self) -> tuple[list[EncoderInput], list[bytes]]:
        """Return and clear the images to encode, and the digests evicted before that."""
        encoded, self._encoded = self._encoded, []
        evicted, self._evicted = self._evicted, []
        return encoded, evicted

    @property
    def max_patches(self) -> int:
        """Maximum patches that the next step encodes; 0 if no unfinished request has images."""
        tokens = max(self._step_tokens, self._largest)
        return tokens * self._patches_per_token if self._pixels else 0

    def reset(self) -> int:
        """Evict all images that no sequence has partly consumed; return their number."""
        unused = [digest for digest, cached in self._cached.items() if not cached.users]
        for digest in unused:
            self._evict(digest)
        return len(unused)

    def _use(self, image: EncoderInput, *, continues: bool) -> None:
        """Use an image in this step; `continues` if the step before used it for this request."""
        cached = self._cached.get(image.digest)
        if not continues:
            self._counters.encoder_cache_queries += 1
            self._counters.encoder_cache_hits += cached is not None
        if cached is None:
            for digest in [each for each in self._cached if each not in self._pinned]:
                if self._num_tokens + image.num_tokens <= self._max_tokens:
                    break
                self._evict(digest)
            cached = self._cached[image.digest] = _CachedImage(image.num_tokens, self._step)
            self._num_tokens += image.num_tokens
            self._budget -= image.num_tokens
            self._encoded.append(image)
            self._counters.encoded_images += 1
        cached.step = self._step
        self._pinned.add(image.digest)
        self._cached.move_to_end(image.digest)

    def _evict(self, digest: bytes) -> None:
        self._num_tokens -= self._cached.pop(digest).num_tokens
        self._pinned.discard(digest)
        self._evicted.append(digest)

    def check_integrity(self, requests: Sequence[Request], running: Sequence[Request]) -> None:
        """Raise AssertionError if an entry is leaked or a count is wrong."""
        assert self._num_tokens == sum(each.num_tokens for each in self._cached.values())
        assert self._num_tokens <= self._max_tokens, "more is kept than there is room for"
        in_use = sorted(r.image.digest for r in running if r.image is not None)
        counted = [d for d, cached in self._cached.items() for _ in range(cached.users)]
        assert sorted(counted) == in_use, "users of images are counted wrongly"
        images = sorted(image.digest for r in requests for image in r.images)
        held = [d for d, pixels in self._pixels.items() for _ in range(pixels.users)]
        assert sorted(held) == images, "pixels are leaked"
