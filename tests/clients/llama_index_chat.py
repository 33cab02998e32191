"""LlamaIndex against a running server.

pip install llama-index-llms-openai-like
BASE_URL=http://127.0.0.1:8000/v1 python llama_index_chat.py
"""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="swell-shakespeare",
    api_base=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    is_chat_model=True,
    max_tokens=24,
    temperature=0.7,
    additional_kwargs={"seed": 7},
)
messages = [ChatMessage(role="system", content="You are Romeo."),
            ChatMessage(role="user", content="Who is Juliet?")]  # fmt: skip

answer = llm.chat(messages)
print("chat:", repr(answer.message.content))
text = "".join(part.delta or "" for part in llm.stream_chat(messages))
assert text == answer.message.content
print("streamed: the same")
print("complete:", repr(llm.complete("Who is Juliet?").text))
