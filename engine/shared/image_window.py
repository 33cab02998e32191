"""Images cross once: which ones an engine still has of a front end, as both know without asking.

Both see the same images in the same order, and forget the least recently used ones by the same
rule. A front end that begins anew, because messages may have been lost, knows of fewer than the
engine has, never of others.
"""

from collections import OrderedDict

from msgspec.structs import replace

from engine.shared.messages import AddRequest

IMAGE_WINDOW_BYTES = 32 << 20
"""Bytes of pixels that an engine keeps for each front end; a photograph has 1 to 10 MB."""


class ImageWindow:
    """The newest images that crossed, of a number of bytes; larger ones are not kept.

    A front end keeps their sizes only, an engine the pixels.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        """Size and pixels by digest, the least recently used first."""

    def clear(self) -> None:
        """Forget all of them."""
        self._images.clear()
        self._num_bytes = 0

    def without_held(self, message: AddRequest) -> AddRequest:
        """Return what to send of a request: without pixels that the engine has."""
        images = []
        for image in message.encoder_inputs:
            if image.digest in self._images:
                self._images.move_to_end(image.digest)
                images.append(replace(image, pixels=b""))
            else:
                self._keep(image.digest, len(image.pixels), b"")
                images.append(image)
        return replace(message, encoder_inputs=images)

    def with_held(self, message: AddRequest) -> AddRequest:
        """Return the request that was sent, with all pixels.

        Raises:
            KeyError: the message before it was lost.
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
