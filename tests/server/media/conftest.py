"""An app that serves a small vision model with scripted engines that support images."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from server.config import FrontEndConfig, MediaConfig
from server.media.processors import Idefics3
from server.store.service import ResponseStore
from server.text.chat_template import ChatTemplate
from server.text.placeholders import Placeholders
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import FakeGenerationClient, Http, app_of
from tests.server.tokens import id_of

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Like SmolVLM's: contents are lists of parts; plain strings would not be rendered."""
TILE = 32
TOKENS = 4
"""Of each tile."""


@pytest.fixture
def processor() -> Idefics3:
    return Idefics3(
        {
            "size": {"longest_edge": 2 * TILE},
            "max_image_size": {"longest_edge": TILE},
            "image_seq_len": TOKENS,
        },
        {},
    )


@pytest.fixture
def template() -> str:
    return TEMPLATE


@pytest.fixture
def tokenizer(backend: Tokenizer, template: str) -> ServedTokenizer:
    own = Tokenizer.from_str(backend.to_str())
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    special += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    own.add_special_tokens([AddedToken(text, special=True) for text in special])
    return ServedTokenizer(
        own,
        eos_token_ids=[id_of(own, "<|eos|>")],
        chat_template=ChatTemplate(template, {}),
        placeholders=Placeholders(["<image>"]),
    )


@pytest.fixture
def media() -> MediaConfig:
    return MediaConfig(max_image_pixels=1 << 20)


@pytest.fixture
def vision(
    config: FrontEndConfig,
    engines: FakeGenerationClient,
    tokenizer: ServedTokenizer,
    processor: Idefics3,
    media: MediaConfig,
) -> Callable[..., Http]:
    """Return a function that creates a client of the app with the given image settings."""

    def make(store: ResponseStore | None = None, **changed: Any) -> Http:
        limit = changed.pop("limit_mm_per_prompt", '{"image": 3}')
        model = msgspec.structs.replace(config.model, limit_mm_per_prompt=limit)
        guards = changed.pop("guards", config.guards)
        changed_media = msgspec.structs.replace(media, **changed)
        own = msgspec.structs.replace(config, model=model, media=changed_media, guards=guards)
        return Http(app_of(own, engines, tokenizer, processor=processor, store=store))

    return make


@pytest.fixture
def http(vision: Callable[..., Http]) -> Http:
    return vision()
