"""The playground sends images with a message, where the engines take them."""

from typing import Any

from tests.server.api.test_status_page import engine, send, view
from tests.server.media.pictures import data_url, encoded, picture
from tests.support.chromium import needs_chromium

pytestmark = needs_chromium

CHOOSE = """(() => {
  const bytes = Uint8Array.from(atob("%s"), (each) => each.charCodeAt(0));
  const chosen = new DataTransfer();
  chosen.items.add(new File([bytes], "cat.png", { type: "image/png" }));
  document.getElementById("images").files = chosen.files;
})()"""


def test_an_image_is_sent_and_shown(browser: Any, http: Any, engines: Any, served: Any) -> None:
    engines.view = view(engine(0))
    url = data_url(encoded(picture(32, 32)))
    with served(http.app) as address:
        browser.open(address)
        browser.wait_until("document.getElementById('model').value === 'tiny'")
        browser.wait_until("!document.getElementById('images-label').hidden")
        places = "['prompt', 'images', 'send'].map((id) => document.getElementById(id)"
        prompt, images, button = browser.run(f"{places}.getBoundingClientRect().toJSON())")
        assert prompt["right"] <= images["left"] < images["right"] <= button["left"]
        assert images["bottom"] == button["bottom"] == prompt["bottom"], "in one row"
        browser.run(CHOOSE % url.partition(",")[2])
        browser.wait_until("document.getElementById('images').files.length === 1")
        send(browser, "what is this")
        assert browser.run("document.querySelector('.user img').src") == url
        assert browser.run("document.querySelector('.user img').alt") == "cat.png"
        assert browser.run("document.getElementById('images').files.length") == 0
    assert len(engines.streams[0].encoder_inputs) == 5


def test_image_picker_is_hidden_without_vision(
    browser: Any, http: Any, engines: Any, served: Any
) -> None:
    engines.view = view(engine(0))
    engines.serves_images = False
    with served(http.app) as address:
        browser.open(address)
        browser.wait_until("document.getElementById('model').value === 'tiny'")
        assert browser.run("document.getElementById('images-label').hidden")
