"""Conversations in requests: turns, and the parts that their contents consist of."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from server.limits import MAX_PARTS, MAX_TOOL_CALLS
from server.schema.body import JsonObject, Name, RequestBody, part_type
from server.schema.tools import ToolCallTurn


class TextPart(RequestBody):
    """A piece of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class RefusalPart(RequestBody):
    """A piece of an assistant's message that said no."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(RequestBody):
    """Where an image is."""

    url: str = Field(description="A data: URL, or one that the operator allows.")
    detail: Name | None = Field(
        None, description="Accepted but not used: the model's processor chooses the size."
    )


class MediaPart(RequestBody):
    """An image, for models that take images; all else is refused.

    Of what tools returned a note says that it was left out, where the model cannot see it.
    """

    type: Name
    image_url: ImageUrl | str | None = None

    @property
    def is_image(self) -> bool:
        """Whether its type is that of images."""
        return self.type in ("image_url", "input_image", "image")

    @property
    def url(self) -> str | None:
        """Where the image is; None if this is no image."""
        if not self.is_image or self.image_url is None:
            return None
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


MessagePart = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[MediaPart, Tag("media")],
    Discriminator(part_type),
]


class ChatMessage(RequestBody):
    """One turn. What a template may read beyond role and content is passed to it as it is."""

    role: Name = Field(description="Roles that Swell does not know are the chat template's.")
    content: str | Annotated[list[MessagePart], Field(max_length=MAX_PARTS)] | None = None
    refusal: str | None = Field(None, description="What an assistant said instead of content.")
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name for reasoning_content.")
    tool_calls: Annotated[list[ToolCallTurn], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None
    function_call: JsonObject | None = Field(None, description="Refused; use tool_calls.")

    @property
    def parts(self) -> list[MessagePart]:
        """The parts of the content, if it has any."""
        return self.content if isinstance(self.content, list) else []
