"""LangChain's ChatOpenAI against a running server.

pip install langchain-openai && BASE_URL=http://127.0.0.1:8000/v1 python langchain_chat.py
"""

import asyncio
import os

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(
    model=os.environ.get("MODEL", "swell-shakespeare"),
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    temperature=0.7,
    seed=7,
    max_tokens=24,
)
messages = [SystemMessage("You are Romeo."), HumanMessage("Who is Juliet?")]

answer = llm.invoke(messages)
print("invoke:", repr(answer.content))
print("usage:", answer.usage_metadata)
assert answer.usage_metadata["output_tokens"] <= 24

streamed = list(llm.stream(messages))
text = "".join(chunk.content for chunk in streamed)
assert text == answer.content, (text, answer.content)
print("stream: the same, in", len(streamed), "chunks")

answers = llm.batch([[HumanMessage(f"Scene {number}")] for number in range(8)])
assert len(answers) == 8
print("batch:", [each.content[:20] for each in answers[:3]])


async def both() -> tuple[str, str]:
    first, second = await asyncio.gather(llm.ainvoke(messages), llm.ainvoke(messages))
    return first.content, second.content


assert asyncio.run(both()) == (text, text)
print("ainvoke: the same twice")

detailed = llm.bind(logprobs=True, top_logprobs=2).invoke(messages)
tokens = detailed.response_metadata["logprobs"]["content"]
assert tokens
assert len(tokens[0]["top_logprobs"]) == 2
print("logprobs of the first token:", tokens[0]["token"], tokens[0]["logprob"])
