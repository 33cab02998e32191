"""Settings of images in requests."""

from typing import Annotated

from engine.shared.config import PositiveFloat, PositiveInt, Section


class MediaConfig(Section, frozen=True, kw_only=True):
    """Images in requests"""

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
        PositiveInt, "Largest image, in pixels; decoding it takes 4 to 16 bytes per pixel."
    ] = 2**25
    image_fetch_timeout: Annotated[PositiveFloat, "Maximum seconds to fetch an image."] = 5.0
    max_image_bytes_in_flight: Annotated[
        PositiveInt,
        "Maximum bytes of images, encoded or prepared, that an API-server process holds; a tenant "
        "may have half. Requests beyond it get 429 or 503.",
    ] = 512 * 2**20
