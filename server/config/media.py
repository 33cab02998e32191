"""Settings of images in requests."""

import contextlib
import json
from typing import Annotated, Any

from engine.shared.config import PositiveFloat, PositiveInt, Section


class MediaConfig(Section, frozen=True, kw_only=True):
    """Images in requests"""

    limit_mm_per_prompt: Annotated[
        str,
        'JSON object with the maximum images of a request, e.g. `{"image": 4}`; 0 refuses them.',
    ] = '{"image": 32}'
    allowed_media_domains: Annotated[
        tuple[str, ...],
        "Hosts that images may be fetched from by http(s) URLs, e.g. `images.example.com` or "
        "`*.example.com`; never from private addresses. Default: none, images come in `data:` "
        "URLs.",
    ] = ()
    allowed_local_media_path: Annotated[
        str | None,
        "Directory of images for `file:` URLs; every client can have the model read any image in "
        "it. Default: none.",
    ] = None
    max_image_bytes: Annotated[
        PositiveInt,
        "Largest image file; a request's images in `data:` URLs also have to fit into its body "
        "(--max-body-bytes).",
    ] = 10 * 2**20
    max_image_pixels: Annotated[
        PositiveInt, "Largest image, in pixels; preparing it takes about ten bytes per pixel."
    ] = 2**25
    image_fetch_timeout: Annotated[PositiveFloat, "Maximum seconds to fetch an image."] = 5.0
    max_image_bytes_in_flight: Annotated[
        PositiveInt,
        "Maximum bytes of images, encoded or prepared, that an API-server process holds; a tenant "
        "may have half. Requests beyond it get 429 or 503.",
    ] = 512 * 2**20

    def __post_init__(self) -> None:
        self.max_images  # noqa: B018 - validates the setting

    @property
    def max_images(self) -> int:
        """Maximum images per request.

        Raises:
            ValueError: `limit_mm_per_prompt` is malformed.
        """
        limits: Any = None
        with contextlib.suppress(ValueError):
            limits = json.loads(self.limit_mm_per_prompt)
        wrong = ValueError('limit_mm_per_prompt must be a JSON object such as {"image": 4}')
        if not isinstance(limits, dict):
            raise wrong
        if unknown := limits.keys() - {"image", "video", "audio"}:
            raise ValueError(f"limit_mm_per_prompt: {min(unknown)} is no kind of media")
        max_images = limits.get("image", 32)
        if type(max_images) is not int or not 0 <= max_images <= 1024:
            raise wrong
        return max_images
