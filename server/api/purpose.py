"""What the served model is for: endpoints that it is not for say which ones it serves."""

from server.api.context import Context
from server.http.errors import ApiError, invalid
from server.pooling.model import PoolingModel

_SERVES = {
    "embed": "/v1/embeddings, /score, /rerank and /pooling",
    "classify": "/classify, /score, /rerank and /pooling",
}


def pooling_model(context: Context) -> PoolingModel:
    """Return how the model makes vectors.

    Raises:
        ApiError: it generates.
    """
    pooling = context.model.pooling
    if pooling is None:
        raise invalid(
            f"model: {context.names[0]!r} generates text and makes no embeddings or scores; serve "
            "a model for that, or this one with --runner pooling",
            "model",
            "model_not_suitable",
        )
    return pooling


def check_generates(context: Context) -> None:
    """Check that the model is one that generates.

    Raises:
        ApiError: it makes vectors.
    """
    pooling = context.model.pooling
    if pooling is not None:
        raise unsuitable(context.names[0], "generates no text", pooling)


def unsuitable(name: str, lacks: str, pooling: PoolingModel) -> ApiError:
    """A model that makes vectors is asked for what it does not do (400)."""
    return invalid(
        f"model: {name!r} {lacks}; it serves {_SERVES[pooling.spec.task]}",
        "model",
        "model_not_suitable",
    )
