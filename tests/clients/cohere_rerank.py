"""Cohere's own client at /v2/rerank and /v1/rerank; prints what it got."""

import os

import cohere

base = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1").removesuffix("/v1")
model = os.environ.get("MODEL", "minilm")
documents = ["Cats sleep a lot", "Paris is the capital of France", "France is in Europe"]
query = "What is the capital of France?"
for client in (cohere.ClientV2("none", base_url=base), cohere.Client("none", base_url=base)):
    answer = client.rerank(model=model, query=query, documents=documents, top_n=2)
    shown = [(each.index, round(each.relevance_score, 3)) for each in answer.results]
    units = answer.meta and answer.meta.billed_units and answer.meta.billed_units.search_units
    print(f"{type(client).__name__}: {shown}, search units {units}")
