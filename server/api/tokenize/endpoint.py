"""POST /tokenize and POST /detokenize."""

from fastapi import APIRouter, Response

from server.answer.injection import told
from server.api.openapi import ENGINE_ERRORS, json_responses
from server.api.route import ModelRoute, json_response
from server.api.services import ServicesDep
from server.api.tokenize.count import known_max_model_len
from server.api.tokenize.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from server.errors import invalid
from server.limits import MAX_COUNTED_TOKENS
from server.text.conversation import render_chat
from server.text.prompt_text import TextTooLong, encode_prompt
from server.text.vocabulary import check_vocabulary

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
    longest = max(MAX_COUNTED_TOKENS, known_max_model_len(services) or 0)
    try:
        token_ids, _ = await encode_prompt(
            services.model.tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            longest=longest,
            keep=None,
        )
    except TextTooLong as error:
        field = "prompt" if body.messages is None else "messages"
        raise invalid(
            f"{field}: texts of up to {longest} tokens are tokenized, but of this one {error}.",
            field,
            code="context_length_exceeded",
        ) from error
    names = None
    if body.return_token_strs:
        names = [services.model.tokenizer.id_to_token(token_id) for token_id in token_ids]
    return json_response(
        TokenizeResponse(
            len(token_ids),
            known_max_model_len(services),
            token_ids,
            names,
        )
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
