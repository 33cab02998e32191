"""Avoids resending images: tracks which ones an engine still holds for a front end.

Both sides see the same images in the same order and evict the least recently used ones by the same
rule. A front end that resets after a possible message loss knows a subset of the engine's images.
"""

from collections import OrderedDict

from msgspec.structs import replace

from engine.shared.messages import AddRequest

IMAGE_WINDOW_BYTES = 32 << 20
"""Bytes of pixels that an engine keeps per front end; a photograph has 1 to 10 MB."""


class ImageWindow:
    """An LRU window of transferred images, bounded in bytes; larger images are not kept.

    A front end keeps only their sizes, an engine the pixels.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        """Size and pixels by digest, least recently used first."""

    def clear(self) -> None:
        """Forget all images."""
        self._images.clear()
        self._num_bytes = 0

    def omit_held(self, message: AddRequest) -> AddRequest:
        """Return the request without pixels that the engine holds."""
        images = []
        for image in message.encoder_inputs:
            if image.digest in self._images:
                self._images.move_to_end(image.digest)
                images.append(replace(image, pixels=b""))
            else:
                self._keep(image.digest, len(image.pixels), b"")
                images.append(image)
        return replace(message, encoder_inputs=images)

    def restore_held(self, message: AddRequest) -> AddRequest:
        """Return the received request with all pixels restored.

        Raises:
            KeyError: an earlier message was lost.
        """
        images = []
        for image in message.encoder_inputs:
            if image.pixels:
                self._keep(image.digest, len(image.pixels), image.pixels)
            else:
                image = replace(image, pixels=self._images[image.digest][1])
                self._images.move_to_end(image.digest)
            images.append(image)
        return replace(message, encoder_inputs=images)

    def _keep(self, digest: bytes, size: int, pixels: bytes) -> None:
        if size > self._max_bytes:
            return
        self._num_bytes += size - self._images.pop(digest, (0, b""))[0]
        self._images[digest] = size, pixels
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._images.popitem(last=False)[1][0]
