"""What is said about a path that there is not."""

import difflib
from collections.abc import Collection

_LONGEST = 200
"""Characters of a path for which others are looked at."""
_NOT_SERVED = {
    "/v1/audio": "Speech and transcription",
    "/v1/images": "Images",
    "/v1/videos": "Videos",
    "/v1/realtime": "The realtime API",
    "/v1/files": "Files",
    "/v1/uploads": "Uploads",
    "/v1/batches": "Batches (`swell run-batch` takes files of requests)",
    "/v1/assistants": "The assistants API (use /v1/responses)",
    "/v1/threads": "The assistants API (use /v1/responses)",
    "/v1/vector_stores": "Vector stores",
    "/v1/fine_tuning": "Fine-tuning",
    "/v1/moderations": "Moderation",
    "/v1/complete": "Anthropic's text completions (use /v1/messages)",
    "/v1beta": "Gemini's API (use /v1/chat/completions)",
    "/api": "Ollama's API (use /v1/chat/completions)",
}
"""Paths of other APIs that clients know, and what is there."""


def no_such_path(path: str, served: Collection[str]) -> str:
    """Return what to say about a path, with the one that was probably meant."""
    path = path.rstrip("/")
    for prefix, what in _NOT_SERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f"{what}: not served here."
    near = difflib.get_close_matches(path, served, 1) if len(path) <= _LONGEST else []
    if near:
        return f"Not Found. Did you mean {near[0]}?"
    return "Not Found. /docs lists the paths."
