"""Images of a conversation, fetched and preprocessed before it is rendered."""

from typing import TYPE_CHECKING

import msgspec

from engine.shared.fair_threads import tenant_id
from server.api.services import Services
from server.errors import invalid_field
from server.generate.conversation import image_parts
from server.generate.request import Conversation, GenerationRequest
from server.http.call import Call
from server.limits import MAX_TOKENS

if TYPE_CHECKING:
    from server.media.images import ImageSource, PreparedImage

_OF_TOOLS = ("tool", "function")


def image_bytes(request: GenerationRequest) -> int:
    """Return the bytes of a request's body that are images, not prompt text."""
    source = request.conversation
    if source is None or request.is_batch:
        return 0
    return sum(len(part.url or "") for _, _, part in image_parts(source.messages))


async def prepare_images(request: GenerationRequest, call: Call, services: Services) -> None:
    """Attach preprocessed images to a request; the call holds them until it ends.

    Raises:
        ApiError: an image is refused, or there is no memory for them.
    """
    source, images = request.conversation, services.model.images
    if images is None or source is None or request.is_batch:
        return
    sources = _sources(source, services)
    if not sources:
        return
    fields = request.fields
    if fields.use_beam_search:
        raise invalid_field("use_beam_search", "is not served with images")
    if fields.truncate_prompt_tokens is not None:
        raise invalid_field("truncate_prompt_tokens", "prompts with images cannot be truncated")
    held = images.hold(call.tenant.id)
    call.on_release.append(held.release)
    # Shortening a conversation can drop images again.
    longest = MAX_TOKENS if source.shortened else request.max_model_len
    prepared = await images.prepare(
        sources,
        held,
        max_model_len=longest,
        copies=request.best_of,
        whole=services.client.needs_original_images,
    )
    request.conversations = [_shown(source, prepared)]


async def with_counted_images(source: Conversation, services: Services) -> Conversation:
    """Return a conversation with image placeholders as they count in the prompt.

    Raises:
        ApiError: there are too many images, or one is refused.
    """
    images = services.model.images
    sources = _sources(source, services)
    if images is None or not sources:
        return source
    held = images.hold(tenant_id.get())
    try:
        return _shown(source, await images.count(sources, held))
    finally:
        held.release()


def _sources(source: Conversation, services: Services) -> "list[ImageSource]":
    """Return the images of a conversation; none if the model takes no images."""
    if services.model.images is None:
        return []
    from server.media.images import ImageSource

    found = image_parts(source.messages)
    if found and not services.client.serves_images:
        for message, field, _ in found:
            if message.role not in _OF_TOOLS:
                raise invalid_field(field, "the engines of this server do not accept images")
        return []
    return [ImageSource(field, part.url or "") for _, field, part in found]


def _shown(source: Conversation, images: "list[PreparedImage]") -> Conversation:
    parts = [part for _, _, part in image_parts(source.messages)]
    named = {id(part): image for part, image in zip(parts, images, strict=True)}
    return msgspec.structs.replace(source, images=named)
