"""Chat templates of requests are rendered in a separate process and stopped at limits."""

import asyncio
import contextlib
from typing import Any

import pytest

from engine.shared.config import ModelConfig
from engine.shared.fair_threads import tenant_id
from server import helper_process
from server.config import FrontEndConfig, HttpConfig
from server.limits import MAX_TEMPLATE
from server.text import request_templates
from server.text.chat_template import Rendering, TemplateFailed
from server.text.request_templates import RequestTemplates

pytestmark = pytest.mark.slow  # it starts processes

MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def templates() -> RequestTemplates:
    return RequestTemplates({"bos_token": "<s>"})


def render(templates: RequestTemplates, source: str, **more: Any) -> str:
    attempt = Rendering(messages=MESSAGES, add_generation_prompt=True, **more)
    return asyncio.run(templates.render(source, [attempt]))


def test_request_template_gets_same_arguments_as_model_template(
    templates: RequestTemplates,
) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ x }}"
    assert render(templates, source, arguments={"x": 1}) == "<s>helloTrue1"


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10**10 }}",
        "{{ range(10**9) | list }}",
        "{% set x = namespace(v=('x' * 1000)) %}{% for i in range(99) %}"
        "{% set x.v = x.v + x.v %}{% endfor %}",
    ],
    ids=range(9),
)
def test_forbidden_template_operations_are_an_error(
    templates: RequestTemplates, source: str
) -> None:
    with pytest.raises(TemplateFailed):
        render(templates, source)
    assert render(templates, "{{ messages[0].role }}") == "user"


@pytest.mark.parametrize("source", [ENDLESS, "{{ 9 ** (9 ** 9) }}"], ids=range(2))
def test_endless_template_is_terminated(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_templates, "MAX_TEMPLATE_SECONDS", 0.2)
    templates = RequestTemplates({})
    with pytest.raises(TemplateFailed, match=r"more than 0\.2 seconds"):
        render(templates, source)
    monkeypatch.undo()
    assert render(templates, "{{ messages[0].role }}") == "user"


def test_flood_of_one_tenant_does_not_delay_templates_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_templates, "MAX_TEMPLATE_SECONDS", 0.3)
    templates, ended = RequestTemplates({}), list[int]()

    async def render_for(tenant: int, source: str) -> None:
        tenant_id.set(tenant)
        with contextlib.suppress(TemplateFailed):
            await templates.render(
                source, [Rendering(messages=MESSAGES, add_generation_prompt=True)]
            )
        ended.append(tenant)

    async def render_all() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(render_for(1, ENDLESS))
            await asyncio.sleep(0)  # the tasks queue their templates
            await group.create_task(render_for(2, "{{ messages[0].role }}"))
            assert len(ended) <= 2, "only the template being rendered comes first"

    asyncio.run(render_all())
    assert ended.count(1) == 4


def test_too_long_rendered_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_templates, "MAX_TEMPLATE_OUTPUT", 10)
    attempt = Rendering(messages=MESSAGES, add_generation_prompt=True)
    job = request_templates.Job("{{ 'x' * 11 }}", {}, [attempt])
    assert request_templates.render(job).error == "it wrote more than 10 characters"


def test_template_process_has_no_environment_of_parent(
    templates: RequestTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWELL_CLUSTER_KEY", "a secret of the cluster")
    process = helper_process._start("server.text.request_templates")
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as environment:
            assert b"SWELL_CLUSTER_KEY" not in environment.read()
    finally:
        helper_process._end(process)


def trusting(http_of: Any) -> Any:
    http = HttpConfig(trust_request_chat_template=True)
    return http_of(FrontEndConfig(model=ModelConfig(model="tiny"), http=http))


def test_a_request_is_rendered_with_its_own_template(
    http_of: Any, engines: Any, tokenizer: Any
) -> None:
    http = trusting(http_of)
    template = "{% for each in messages %}{{ each.content }}!{% endfor %}"
    http.chat(chat_template=template)
    expected = tokenizer.encode("hello!", add_special_tokens=False)
    assert engines.streams[-1].prompt_token_ids == expected
    body = {"messages": MESSAGES, "chat_template": template}
    assert http.post("/tokenize", body).json()["tokens"] == expected


def test_a_request_can_be_retried_if_no_process_can_start(
    http_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = trusting(http_of)
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}"}
    with monkeypatch.context() as broken:
        broken.setattr("server.helper_process.sys.executable", "/no/such/python")
        answer = http.post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (503, None)
    assert http.post("/v1/chat/completions", body).status_code == 200


def test_tools_are_described_where_neither_template_renders_them(
    http_of: Any, engines: Any
) -> None:
    http = trusting(http_of)
    tools = [{"type": "function", "function": {"name": "measure"}}]
    shown = "{% for each in messages %}{{ each.content }}{% endfor %}"
    for template, told in ((shown, True), (shown + "{{ tools[0].function.name }}", False)):
        http.chat(chat_template=template, tools=tools, max_tokens=1)
        text = http.post("/detokenize", {"tokens": engines.streams[-1].prompt_token_ids})
        assert "measure" in text.json()["prompt"]
        assert ("<tool_call>" in text.json()["prompt"]) is told


def test_templates_are_refused_unless_they_are_trusted(http: Any, http_of: Any) -> None:
    for each, template in (
        (http, "{{ messages }}"),
        (trusting(http_of), "{% if %}"),
        (trusting(http_of), ""),
        (trusting(http_of), "x" * (MAX_TEMPLATE + 1)),
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = each.post(path, {"messages": MESSAGES, "chat_template": template})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "chat_template"
