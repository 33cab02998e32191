"""Images in chats, responses and messages reach engines where the prompt shows them."""

import base64
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from server.config import GuardConfig
from server.media.images import ImageBytes
from server.store.service import ResponseStore
from tests.server.conftest import FakeGenerationClient, Http, prompt_of
from tests.server.media.conftest import TILE, TOKENS
from tests.server.media.pictures import data_url, encoded, picture
from tests.support.stores import sqlite_backend

SQUARE = data_url(encoded(picture(TILE, TILE)))
WIDE = data_url(encoded(picture(TILE, 2 * TILE), "JPEG"), "image/jpeg")


def image(url: str = SQUARE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def whole(tokens: int = TOKENS) -> str:
    """Return the placeholder text of an image's last tile."""
    return f"<fake_token_around_image><global-img>{'<image>' * tokens}<fake_token_around_image>"


def check_places(engines: FakeGenerationClient, count: int) -> None:
    """Check that the tokens of all tiles are exactly at the positions sent to engines."""
    stream = engines.streams[-1]
    token = engines.tokenizer.token_to_id("<image>")
    claimed: list[int] = []
    for each in stream.encoder_inputs:
        assert len(each.pixels) == 3 * each.height * each.width
        assert len(each.digest) == 16
        claimed += range(each.position, each.position + each.num_tokens)
    found = [at for at, each in enumerate(stream.prompt_token_ids) if each == token]
    assert claimed == found
    assert len(stream.encoder_inputs) == count


def test_a_photograph_fits_into_a_body(http: Http, engines: FakeGenerationClient) -> None:
    noise = Image.frombytes("RGB", (1024, 1024), random.Random(1).randbytes(3 * 2**20))
    photograph = data_url(encoded(noise))
    assert len(photograph) > GuardConfig().max_body_bytes
    http.chat(messages=[user(image(photograph))])
    assert engines.streams[-1].encoder_inputs


def test_image_stays_at_position_of_its_part(http: Http, engines: FakeGenerationClient) -> None:
    body = http.chat(messages=[user(text("before "), image(), text(" after"))])
    shown = four_tiles()
    assert prompt_of(engines) == f"User: before {shown} after<end_of_utterance>\nAssistant:"
    check_places(engines, 5)
    assert body["usage"]["prompt_tokens"] == len(engines.streams[-1].prompt_token_ids)


def four_tiles() -> str:
    """Return the placeholder text of an image with two rows and columns."""
    tile = "<image>" * TOKENS
    rows = [
        "".join(f"<fake_token_around_image><row_{r}_col_{c}>{tile}" for c in (1, 2)) + "\n"
        for r in (1, 2)
    ]
    return "".join(rows) + "\n" + whole()


def test_several_images_of_several_messages_keep_their_order(
    http: Http, engines: FakeGenerationClient
) -> None:
    engines.context = 2048
    http.chat(
        messages=[user(image(), image(WIDE)), {"role": "assistant", "content": "ok"}, user(image())]
    )
    check_places(engines, 5 + 3 + 5)
    digests = [each.digest for each in engines.streams[-1].encoder_inputs]
    assert digests[:5] == digests[8:]
    assert len(set(digests[5:8]) & set(digests[:5])) == 0


def test_engines_that_resize_get_original_images(http: Http, engines: FakeGenerationClient) -> None:
    engines.needs_original_images, engines.context = True, 2048
    large = picture(3 * TILE, 5 * TILE)
    http.chat(messages=[user(text("a"), image(), image(data_url(encoded(large)))), user(image())])
    ids = engines.streams[-1].prompt_token_ids
    token, inputs = engines.tokenizer.token_to_id("<image>"), engines.streams[-1].encoder_inputs
    assert [(each.height, each.width) for each in inputs] == [
        (TILE, TILE), (3 * TILE, 5 * TILE), (TILE, TILE),
    ]  # fmt: skip
    assert inputs[1].pixels == large.tobytes()
    assert inputs[0].digest == inputs[2].digest != inputs[1].digest
    outside, before = list(ids), 0
    for each in inputs:
        end = each.position + each.num_tokens
        assert ids[each.position] == ids[end - 1] == token
        assert each.position >= before
        outside[each.position : end] = [0] * each.num_tokens
        before = end
    assert token not in outside


def test_original_images_are_bounded(
    http: Http, engines: FakeGenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.media.images.MAX_PIXEL_BYTES", 3 * 200 * 200)
    engines.needs_original_images = True
    wide, body = data_url(encoded(picture(200, 201))), {"model": "tiny"}
    answer = http.post("/v1/chat/completions", {**body, "messages": [user(image(wide))]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_all_choices_carry_the_image(http: Http, engines: FakeGenerationClient) -> None:
    http.chat(messages=[user(image())], n=2)
    first, second = engines.streams
    assert first.encoder_inputs == second.encoder_inputs != []


def test_templates_of_parts_get_text_as_a_part(http: Http, engines: FakeGenerationClient) -> None:
    http.chat(messages=[{"role": "user", "content": "hello"}])
    assert prompt_of(engines) == "User: hello<end_of_utterance>\nAssistant:"
    assert engines.streams[-1].encoder_inputs == []


@pytest.mark.parametrize(
    "template", ["{% for message in messages %}{{ message.content }}|{% endfor %}"]
)
def test_templates_of_text_get_the_marker_at_image_position(
    http: Http, engines: FakeGenerationClient
) -> None:
    http.chat(messages=[user(text("a"), image(), text("b"))])
    assert prompt_of(engines) == f"a\n{four_tiles()}\nb|"
    check_places(engines, 5)


@pytest.mark.parametrize(
    "written",
    ["<image>", "a <image><image> b", "\U0010f000 \U0010f001 \U0010f010", "<ima", "ge>"],
)
def test_client_text_never_becomes_an_image_token(
    http: Http, engines: FakeGenerationClient, written: str
) -> None:
    token = engines.tokenizer.token_to_id("<image>")
    http.chat(messages=[{"role": "user", "content": written}])
    assert token not in engines.streams[-1].prompt_token_ids
    http.chat(messages=[user(text(written), image())])
    check_places(engines, 5)
    shown = written.translate({ord(each): "\ufffd" for each in written if each > "\U0010efff"})
    assert prompt_of(engines).startswith(f"User: {shown}<fake_token_around_image>")
    http.complete(prompt=written)
    assert token not in engines.streams[-1].prompt_token_ids
    assert prompt_of(engines) == shown


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user(text("hi")), {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function":
             {"name": "f", "arguments": '{"a": "\\u003cimage>"}'}}]},
            {"role": "tool", "tool_call_id": "c", "content": "<image>"}]},
        {"messages": [{"role": "user", "content": "hi", "name": "<image>"}], "tools": [
            {"type": "function", "function": {"name": "f", "description": "<image>"}}]},
        {"messages": [{"role": "system", "content": "<image>"}, user(text("hi"))]},
    ],
)  # fmt: skip
def test_other_fields_never_become_image_tokens(
    http: Http, engines: FakeGenerationClient, body: dict[str, Any]
) -> None:
    engines.context = 2048
    http.chat(**body)
    assert "<image>" in prompt_of(engines)
    token = engines.tokenizer.token_to_id("<image>")
    assert token not in engines.streams[-1].prompt_token_ids


def test_image_token_ids_in_prompts_are_refused(http: Http, engines: FakeGenerationClient) -> None:
    token = engines.tokenizer.token_to_id("<image>")
    answer = http.post("/v1/completions", {"model": "tiny", "prompt": [5, token]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_stored_response_continues_with_its_image(
    vision: Callable[..., Http], engines: FakeGenerationClient, tmp_path: Path
) -> None:
    engines.context = 2048
    store = ResponseStore(sqlite_backend(tmp_path / "kept.sqlite", 1 << 24, 3600.0))
    http = vision(store)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": SQUARE}]}
    first = http.post("/v1/responses", {"model": "tiny", "input": [item]}).json()
    body = {"model": "tiny", "input": "more", "previous_response_id": first["id"]}
    assert http.post("/v1/responses", body).status_code == 200
    store.close()
    check_places(engines, 5)
    assert engines.streams[0].encoder_inputs == engines.streams[1].encoder_inputs


def test_responses_accept_images_of_users_and_tool_outputs(
    http: Http, engines: FakeGenerationClient
) -> None:
    engines.context = 2048
    shown = {"type": "input_image", "image_url": SQUARE, "detail": "auto"}
    said = {"type": "input_text", "text": "see"}
    item = {"role": "user", "content": [said, shown]}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [shown]}
    answer = http.post("/v1/responses", {"model": "tiny", "input": [item, called, result]})
    assert answer.status_code == 200, answer.text
    check_places(engines, 10)
    assert "see<fake_token_around_image>" in prompt_of(engines)


def test_truncation_drops_turns_with_images(http: Http, engines: FakeGenerationClient) -> None:
    engines.context = 60
    shown = {"type": "input_image", "image_url": WIDE}
    turn = {"role": "user", "content": [shown]}
    body = {"model": "tiny", "input": [turn, turn, turn], "max_output_tokens": 1}
    answer = http.post("/v1/responses", body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = http.post("/v1/responses", {**body, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    check_places(engines, 3)


def message_image(content: bytes) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_messages_accept_images_of_users_and_tools(
    http: Http, engines: FakeGenerationClient
) -> None:
    engines.context = 2048
    shown = message_image(encoded(picture(TILE, TILE)))
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("read"), shown]}
    messages = [
        user(text("hi")),
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        user(result, shown, text("what?")),
    ]  # fmt: skip
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": messages}
    answer = http.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    check_places(engines, 10)
    del body["max_tokens"]
    counted = http.post("/v1/messages/count_tokens", body)
    assert counted.json() == {"input_tokens": len(engines.streams[-1].prompt_token_ids)}


def test_errors_of_messages_name_the_block(http: Http) -> None:
    broken = message_image(b"nothing")
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("read"), broken]}
    for content, field in (
        ([text("a"), broken], "messages[0].content[1]"),
        ([result], "messages[0].content[0].content[1]"),
    ):
        body = {"model": "tiny", "max_tokens": 4, "messages": [user(*content)]}
        answer = http.post("/v1/messages", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"n": 128, "max_tokens": 1}, None),
        ({"messages": [{"role": "assistant", "content": [image()]}]}, "messages[0].content[0]"),
        ({"messages": [user(image(), image(), image(), image())]}, "messages"),
        ({"messages": [user({"type": "video_url", "video_url": {}})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "video", "video": "a.mp4"})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "image_url"})]}, "messages[0].content[0]"),
        ({"messages": [user(image("data:image/png;base64,AAAA"))]}, "messages[0].content[0]"),
    ],
)
def test_unsupported_images_are_refused_by_name(
    http: Http, engines: FakeGenerationClient, fields: dict[str, Any], param: str | None
) -> None:
    answer = http.post(
        "/v1/chat/completions", {"model": "tiny", "messages": [user(image())], **fields}
    )
    if param is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert engines.streams == []


def source(**fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "base64", **fields}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("/v1/chat/completions", {"messages": [user({"type": "input_audio"})]},
         "messages[0].content[0]", "this model reads text and images; send no input_audio"),
        ("/v1/messages", {"max_tokens": 1, "messages": [user(text("a"), source(data="QUJD"))]},
         "messages[0].content[1].source.type", "only 'text' documents are supported, not 'base64'"),
        ("/v1/messages", {"max_tokens": 1, "messages": [user({"type": "image"})]},
         "messages[0].content[0]", "it holds no image"),
        ("/v1/responses", {"input": [user({"type": "input_file", "file_id": "f"})]},
         "input[0].content[0].type", "input_file is not supported"),
        ("/v1/responses", {"input": [user({"type": "input_audio"})]},
         "input[0].content[0].type", "input_audio is not supported"),
        ("/v1/responses", {"input": [user({"type": "input_image", "file_id": "f"})]},
         "input[0].content[0].image_url", "Field required; images by file_id are not supported"),
        ("/v1/responses/input_tokens", {"input": [user({"type": "input_file"})]},
         "input[0].content[0].type", "input_file is not supported"),
        ("/v1/messages/count_tokens", {"messages": [user(source())]},
         "messages[0].content[0].source.type", "only 'text' documents are supported"),
    ],
)  # fmt: skip
def test_errors_of_vision_models_do_not_mention_text_only(
    http: Http, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = http.post(path, {"model": "tiny", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert f"{param}: {said}" in error["message"]
    assert error.get("param", param) == param, "errors of messages have no field for it"


def test_too_many_image_tokens_are_refused_before_decoding(
    http: Http, engines: FakeGenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.context = 16
    decoded: list[object] = []
    monkeypatch.setattr(Image.Image, "resize", decoded.append)
    answer = http.post("/v1/chat/completions", {"model": "tiny", "messages": [user(image())]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert decoded == []


def test_engines_without_vision_are_reported(http: Http, engines: FakeGenerationClient) -> None:
    engines.serves_images = False
    answer = http.post("/v1/chat/completions", {"model": "tiny", "messages": [user(image())]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert "the engines of this server do not accept images" in error["message"]
    http.chat(messages=[user(text("hi")), {"role": "assistant", "content": "x"},
                        {"role": "tool", "tool_call_id": "c", "content": [image()]}])  # fmt: skip
    assert "omitted" in prompt_of(engines)


def test_images_are_refused_if_limit_is_zero(
    vision: Callable[..., Http],
) -> None:
    http = vision(limit_mm_per_prompt='{"image": 0}')
    answer = http.post("/v1/chat/completions", {"model": "tiny", "messages": [user(image())]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"


@pytest.mark.parametrize(
    "template", ["{% for message in messages %}{% for part in message.content if part.type == "
                 "'text' %}{{ part.text }}{% endfor %}{% endfor %}"],
)  # fmt: skip
def test_template_without_image_support_is_reported(http: Http) -> None:
    answer = http.post("/v1/chat/completions", {"model": "tiny", "messages": [user(image())]})
    assert answer.status_code == 400
    assert "the chat template shows 0 of 1 images" in answer.json()["error"]["message"]


def test_held_image_bytes_are_limited(
    vision: Callable[..., Http], engines: FakeGenerationClient
) -> None:
    small = vision(max_image_bytes_in_flight=40_000)
    answer = small.post(
        "/v1/chat/completions", {"model": "tiny", "messages": [user(image(), image(), image())]}
    )
    assert answer.status_code == 429
    assert answer.headers["retry-after"]
    for _ in range(3):  # a finished request releases its memory
        assert small.chat(messages=[user(image())])


def test_images_that_are_only_counted_are_held_by_their_tenant(
    vision: Callable[..., Http], monkeypatch: pytest.MonkeyPatch
) -> None:
    http = vision(guards=GuardConfig(api_key=("ann", "bob")))
    images = http.app.state.services.model.images
    held: list[int] = []
    hold = images.hold

    def hold_for(tenant: int) -> ImageBytes:
        held.append(tenant)
        account: ImageBytes = hold(tenant)
        return account

    monkeypatch.setattr(images, "hold", hold_for)
    chat = {"model": "tiny", "messages": [user(image())]}
    source = {"type": "base64", "media_type": "image/png", "data": SQUARE.partition(",")[2]}
    counted = {"model": "tiny", "messages": [user({"type": "image", "source": source})]}
    for path, body, key in (
        ("/v1/chat/completions", chat, "ann"),
        ("/v1/messages/count_tokens", counted, "ann"),
        ("/v1/messages/count_tokens", counted, "bob"),
    ):
        answer = http.post(path, body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
    of_ann, counted_of_ann, counted_of_bob = held
    assert of_ann == counted_of_ann != counted_of_bob


def test_images_are_counted_in_metrics(http: Http) -> None:
    http.chat(messages=[user(image(), image(WIDE))])
    http.post("/v1/chat/completions", {"model": "tiny", "messages": [user(image("file:///x"))]})
    series = http.get("/metrics").text
    assert 'swell_images_total{model_name="tiny"} 2.0' in series
    assert f'swell_image_tokens_total{{model_name="tiny"}} {8 * TOKENS}.0' in series
    assert f'swell_image_pixel_bytes_total{{model_name="tiny"}} {8 * 3 * TILE * TILE}.0' in series
    assert 'image_prepare_time_seconds_count{model_name="tiny"} 1.0' in series
    assert 'image_refusals_total{model_name="tiny",reason="invalid_image"} 1.0' in series
