"""The images of a request: validated, counted, and prepared for the encoder.

Slow work runs in a dedicated thread pool that tenants share fairly. The memory of a request's
images counts against a budget until the request ends.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from engine.shared.fair_threads import FairThreads
from engine.shared.messages import EncoderInput
from server.config.media import MediaConfig
from server.errors import ApiError, context_length_exceeded, invalid, unavailable
from server.limits import MAX_PIXEL_BYTES
from server.media.decode import BadImage, ImageFile, encoder_inputs
from server.media.processors import ImagePlan, ImageProcessor
from server.media.sources import ImageSources
from server.observe.metrics import FrontEndMetrics
from server.tenant_budget import TenantBudget
from server.text.placeholders import IMAGE, PART

T = TypeVar("T")

_TOO_MUCH_OF_ONE = ApiError(
    429,
    "Your requests hold too many bytes of images; try again when some have ended.",
    kind="requests",
    code="rate_limit_exceeded",
    headers=(("retry-after", "1"),),
)


class ImageSource(NamedTuple):
    """An image that a request names."""

    field: str
    url: str


class PreparedImage(NamedTuple):
    """An image of a prompt."""

    plan: ImagePlan
    inputs: tuple[EncoderInput, ...]
    """The encoder inputs, with position 0: one for the entire image, or one per size of the plan.
    Empty if the image was only counted."""


class ImageBytes:
    """Accounts for the image bytes of one request; always call `release` at its end."""

    def __init__(self, budget: TenantBudget, tenant: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._size = 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes.

        Raises:
            ApiError: 429 if the tenant's budget is exhausted, 503 if the server's is.
        """
        exceeded = self._budget.exceeded(self._tenant, size)
        if exceeded is not None:
            raise (
                _TOO_MUCH_OF_ONE
                if exceeded == "own"
                else unavailable("The server holds too many bytes of images; try again.")
            )
        self._budget.take(self._tenant, size)
        self._size += size

    def release_part(self, size: int) -> None:
        """Release `size` bytes."""
        self._budget.release(self._tenant, size)
        self._size -= size

    def release(self) -> None:
        """Release all bytes; idempotent."""
        self.release_part(self._size)


class Images:
    """Prepares images for the served model.

    Args:
        token_id: id of the image placeholder token.
        max_images: maximum images per request.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        token_id: int,
        config: MediaConfig,
        metrics: FrontEndMetrics,
        *,
        max_images: int,
    ) -> None:
        self.processor = processor
        self.token_id = token_id
        self.max_images = max_images
        self._max_pixels = config.max_image_pixels
        local = config.allowed_local_media_path
        self._sources = ImageSources(
            domains=config.allowed_media_domains,
            local_path=None if local is None else Path(local),
            max_bytes=config.max_image_bytes,
            seconds=config.image_fetch_timeout,
        )
        max_bytes = config.max_image_bytes_in_flight
        self._budget = TenantBudget(max_bytes // 2, max_bytes)
        self._threads = FairThreads(max(1, min(4, (os.cpu_count() or 1) // 2)), "images")
        self._metrics = metrics

    def hold(self, tenant: int) -> ImageBytes:
        """Return an empty memory account for the images of a new request."""
        return ImageBytes(self._budget, tenant)

    async def count(
        self, sources: Sequence[ImageSource], image_bytes: ImageBytes
    ) -> list[PreparedImage]:
        """Return the images with their plans only, without decoding them.

        Raises:
            ApiError: there are too many images, or one is rejected.
        """
        with self._counted(sources):
            return [
                PreparedImage(plan, ())
                for _, plan in await self._open_sources(sources, image_bytes)
            ]

    async def prepare(
        self,
        sources: Sequence[ImageSource],
        image_bytes: ImageBytes,
        *,
        max_model_len: int,
        copies: int = 1,
        whole: bool = False,
    ) -> list[PreparedImage]:
        """Return the images decoded and ready for the engines.

        Args:
            image_bytes: accounts for their bytes; those of encoded files are released on return.
            max_model_len: images with this many tokens or more are refused before decoding.
            copies: number of sequences that each carry the images to an engine.
            whole: keep the original sizes, because the engines resize.

        Raises:
            ApiError: there are too many images, one is rejected, or the memory budget is exhausted.
        """
        started_at = time.monotonic()
        with self._counted(sources):
            files = await self._open_sources(sources, image_bytes)
            plans = [plan for _, plan in files]
            tokens = sum(plan.num_tokens for plan in plans)
            if tokens >= max_model_len:
                raise context_length_exceeded(max_model_len, tokens, 1, "messages")
            size = sum(
                3 * file.height * file.width if whole else plan.num_bytes for file, plan in files
            )
            if size * copies > MAX_PIXEL_BYTES:
                raise invalid(
                    f"messages: {len(sources)} images for {copies} sequences have {size * copies} "
                    f"bytes of pixels as sent to engines, more than {MAX_PIXEL_BYTES}",
                    "messages",
                )
            image_bytes.take(size)
            prepared = []
            for source, (file, _) in zip(sources, files, strict=True):
                make = partial(encoder_inputs, whole=whole)
                made = await self._in_thread(source, make, file, self.processor)
                prepared.append(PreparedImage(*made))
            image_bytes.release_part(sum(file.num_bytes for file, _ in files))
        for image in prepared:
            self._metrics.count("images")
            self._metrics.count(
                "image_pixel_bytes", by=sum(len(each.pixels) for each in image.inputs)
            )
            self._metrics.count("image_tokens", by=image.plan.num_tokens)
        self._metrics.observe("image_prepare_time_seconds", time.monotonic() - started_at)
        return prepared

    async def _open_sources(
        self, sources: Sequence[ImageSource], image_bytes: ImageBytes
    ) -> list[tuple[ImageFile, ImagePlan]]:
        if len(sources) > self.max_images:
            raise invalid(
                f"messages: {len(sources)} images are more than the {self.max_images} that a "
                "request may have (--limit-mm-per-prompt)",
                "messages",
                "too_many_images",
            )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._file(source, image_bytes)) for source in sources]
        return [task.result() for task in tasks]

    async def _file(
        self, source: ImageSource, image_bytes: ImageBytes
    ) -> tuple[ImageFile, ImagePlan]:
        try:
            content = await self._sources.read(source.url)
        except BadImage as error:
            raise _refusal(source, error) from error
        image_bytes.take(len(content))
        file = await self._in_thread(source, ImageFile, content, self._max_pixels)
        return file, self.processor.plan(file.height, file.width)

    async def _in_thread(self, source: ImageSource, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, function, *args)
        except BadImage as error:
            raise _refusal(source, error) from error

    def prompt_text(self, text: str, images: Sequence[PreparedImage]) -> str:
        """Replace the marker of each image in a rendered conversation by its placeholder text.

        Raises:
            ApiError: the number of markers is not the number of images.
        """
        # Templates that do not support content parts leave these placeholders in the text.
        text = text.replace(PART, "\n").replace(IMAGE, self.processor.marker)
        first, *others = text.split(self.processor.marker)
        if len(others) != len(images):
            raise invalid(
                f"messages: the chat template shows {len(others)} of {len(images)} images: it may "
                "not take any from messages of this role",
                "messages",
            )
        pieces = [first]
        for image, piece in zip(images, others, strict=True):
            pieces += [image.plan.text, piece]
        return "".join(pieces)

    def placed(
        self, token_ids: list[int], images: Sequence[PreparedImage]
    ) -> tuple[EncoderInput, ...]:
        """Return the encoder inputs, each with the position of its placeholder tokens.

        Raises:
            ApiError: the placeholder tokens of the prompt do not match the images.
        """
        inputs, at = [], 0
        try:
            for image in images:
                runs = []
                for length in image.plan.runs:
                    first = token_ids.index(self.token_id, at)
                    at = first + length
                    if token_ids[first:at].count(self.token_id) != length:
                        raise ValueError
                    runs.append((first, length))
                if len(image.inputs) == 1:
                    runs = [(runs[0][0], at - runs[0][0])]
                inputs += [
                    msgspec.structs.replace(each, position=first, num_tokens=length)
                    for each, (first, length) in zip(image.inputs, runs, strict=True)
                ]
        except ValueError:
            at = 0
        if self.token_id in token_ids[at:]:
            raise invalid("messages: the prompt and its images do not match", "messages")
        return tuple(inputs)

    @contextmanager
    def _counted(self, sources: Sequence[ImageSource]) -> Iterator[None]:
        """Count refusals by reason; raise only the first error of an exception group."""
        try:
            yield
        except BaseExceptionGroup as failures:
            first = next(_flattened(failures))
            self._metrics.count("image_refusals", _reason(first))
            raise first from None
        except ApiError as error:
            self._metrics.count("image_refusals", _reason(error))
            raise


def _flattened(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in failures.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _flattened(each)
        else:
            yield each


def _refusal(source: ImageSource, error: BadImage) -> ApiError:
    return invalid(f"{source.field}: {error}", source.field, "invalid_image")


def _reason(error: BaseException) -> str:
    """Return the metric label of a refusal."""
    if not isinstance(error, ApiError):
        return "error"
    if error.status != 400:
        return "no_room"
    return error.code or "too_large"
