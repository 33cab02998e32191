"""LangChain's `OpenAIEmbeddings`, unchanged; prints what it got."""

import asyncio
import os

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

embeddings = OpenAIEmbeddings(
    model=os.environ.get("MODEL", "minilm"),
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key="none",
    check_embedding_ctx_length=False,  # else it sends token ids of OpenAI's own tokenizer
)
texts = ["The cat sleeps on the stove", "Interest rates rose", "Rain is expected"]
vectors = embeddings.embed_documents(texts)
print("embed_documents:", len(vectors), "of", len(vectors[0]))
query = embeddings.embed_query("The cat sleeps on the stove")
print("embed_query: the same", max(abs(query[i] - vectors[0][i]) for i in range(len(query))) < 1e-6)
print("aembed_query:", len(asyncio.run(embeddings.aembed_query("pets"))))
store = InMemoryVectorStore.from_texts(texts, embeddings)
found = store.similarity_search_with_score("will I need an umbrella", k=1)
print("vector store:", [(document.page_content, round(score, 3)) for document, score in found])
