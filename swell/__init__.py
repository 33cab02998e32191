"""Swell as a library: engine and endpoints in this process, without HTTP (docs/library.md).

`LLM` blocks until answers are complete, `AsyncLLM` is for asyncio and streams.
"""

from swell.llm import LLM, AsyncLLM, RequestFailed

__all__ = ["LLM", "AsyncLLM", "RequestFailed"]
