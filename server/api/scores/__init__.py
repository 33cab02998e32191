"""POST /score and POST /rerank: how well texts fit others."""
