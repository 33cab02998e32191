"""POST /tokenize and POST /detokenize."""

from fastapi import APIRouter, Response

from server.answer.injection import told
from server.api.openapi import ENGINE_ERRORS, json_responses
from server.api.route import ModelRoute, json_response
from server.api.services import ServicesDep
from server.api.tokenize.count import known_max_model_len, tokenized
from server.api.tokenize.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from server.errors import invalid
from server.text.conversation import render_chat
from server.text.tokenizer import check_vocabulary

router = APIRouter(route_class=ModelRoute)


@router.post("/tokenize", responses=json_responses(TokenizeResponse, *ENGINE_ERRORS))
async def tokenize(body: TokenizeRequest, services: ServicesDep) -> Response:
    """Show the token ids that a prompt or a conversation has."""
    services.asked_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("exactly one of prompt and messages must be given", "prompt")
    if body.messages is None:
        text, add_special_tokens = body.prompt or "", body.add_special_tokens is not False
        if (placeholders := services.model.tokenizer.placeholders) is not None:
            text = placeholders.hide(text)
    else:
        text = await render_chat(
            services.model.tokenizer,
            body.messages,
            template=body.chat_template,
            templates=services.model.templates,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            told=told if services.model.formats.tells_tools else None,
            arguments=body.chat_template_kwargs,
        )
        add_special_tokens = bool(body.add_special_tokens)
    field = "prompt" if body.messages is None else "messages"
    token_ids = await tokenized(text, services, field, add_special_tokens=add_special_tokens)
    names = None
    if body.return_token_strs:
        names = [services.model.tokenizer.id_to_token(token_id) for token_id in token_ids]
    return json_response(
        TokenizeResponse(len(token_ids), known_max_model_len(services), token_ids, names)
    )


@router.post("/detokenize", responses=json_responses(DetokenizeResponse, *ENGINE_ERRORS))
async def detokenize(body: DetokenizeRequest, services: ServicesDep) -> Response:
    """Show the text of token ids."""
    services.asked_model(body.model)
    check_vocabulary(body.tokens, services.model.tokenizer.vocab_size, "tokens")
    text = await services.model.tokenizer.decode_async(
        body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
    )
    return json_response(DetokenizeResponse(text))
