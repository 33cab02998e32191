"""POST /v1/responses and /v1/responses/input_tokens."""

from functools import partial

from server.api.body import read_body
from server.api.context import Context
from server.api.generation import generate
from server.api.responses.background import answer_at_once
from server.api.responses.items import InputTokens
from server.api.responses.keeping import Keeping, own_items
from server.api.responses.parse import parse, parse_count
from server.api.responses.render import renderer
from server.api.responses.schema import ItemReference, ResponsesRequest
from server.api.tokenize.count import count_tokens_of
from server.http.call import Call
from server.http.errors import ApiError, invalid

_UNKEPT = "nothing is kept between requests: the server runs with --response-store none"


async def create_response(call: Call, context: Context) -> None:
    """Answer a list of items with more items."""
    request = read_body(ResponsesRequest, call.body)
    if context.store is None:
        _refuse_kept(request)
        await generate(call, context, request, parse, renderer)
        return
    keeping = Keeping(context.store, str(call.tenant.id), request)
    whole, earlier = await keeping.whole_request()
    if request.background:
        await answer_at_once(call, context, keeping, whole, earlier)
        return
    parsed = partial(parse, earlier=earlier)
    await generate(call, context, whole, parsed, keeping.renderer, keeping.keep)


async def count_input_tokens(call: Call, context: Context) -> None:
    """Count the tokens that a response's input would have."""
    request, earlier = read_body(ResponsesRequest, call.body), 0
    context.asked_model(request.model)
    if context.store is None:
        _refuse_kept(request)
    else:
        keeping = Keeping(context.store, str(call.tenant.id), request)
        request, earlier = await keeping.whole_request()
    source, blame = parse_count(request, earlier)
    try:
        count = await count_tokens_of(source, context, "input")
    except ApiError as error:
        raise blame(error) from error
    await call.send_struct(InputTokens(count))


def _refuse_kept(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "store", "background"):
        if getattr(request, name):
            raise invalid(f"{name}: {_UNKEPT}", name)
    for index, item in enumerate(own_items(request)):
        if isinstance(item, ItemReference):
            raise invalid(f"input[{index}]: {_UNKEPT}", f"input[{index}]")
