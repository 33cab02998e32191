"""POST /tokenize and POST /detokenize."""

from server.access.limits import MAX_COUNTED_TOKENS
from server.api.body import read_body
from server.api.context import Context
from server.api.tokenize.count import known_max_model_len
from server.api.tokenize.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from server.generate.vocabulary import check_vocabulary
from server.http.call import Call
from server.http.errors import invalid
from server.text.conversation import render_chat
from server.text.prompt_text import TextTooLong, encode_prompt
from server.tool_calls.injection import told


async def tokenize(call: Call, context: Context) -> None:
    """Show the token ids that a prompt or a conversation has."""
    request = read_body(TokenizeRequest, call.body)
    context.asked_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages must be given", "prompt")
    if request.messages is None:
        text, add_special_tokens = request.prompt or "", request.add_special_tokens is not False
    else:
        text = await render_chat(
            context.model.tokenizer,
            request.messages,
            template=request.chat_template,
            templates=context.model.templates,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            tools=[tool.model_dump(exclude_unset=True) for tool in request.tools or ()],
            told=told if context.model.formats.tells_tools else None,
            arguments=request.chat_template_kwargs,
        )
        add_special_tokens = bool(request.add_special_tokens)
    longest = max(MAX_COUNTED_TOKENS, known_max_model_len(context) or 0)
    try:
        token_ids, _ = await encode_prompt(
            context.model.tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            longest=longest,
            keep=None,
        )
    except TextTooLong as error:
        field = "prompt" if request.messages is None else "messages"
        raise invalid(
            f"{field}: texts of up to {longest} tokens are tokenized, but of this one {error}.",
            field,
            code="context_length_exceeded",
        ) from error
    names = None
    if request.return_token_strs:
        names = [context.model.tokenizer.id_to_token(token_id) for token_id in token_ids]
    await call.send_struct(
        TokenizeResponse(
            len(token_ids),
            known_max_model_len(context),
            token_ids,
            names,
        )
    )


async def detokenize(call: Call, context: Context) -> None:
    """Show the text of token ids."""
    request = read_body(DetokenizeRequest, call.body)
    context.asked_model(request.model)
    check_vocabulary(request.tokens, context.model.tokenizer.vocab_size, "tokens")
    text = await context.model.tokenizer.decode_async(
        request.tokens, skip_special_tokens=bool(request.skip_special_tokens)
    )
    await call.send_struct(DetokenizeResponse(text))
