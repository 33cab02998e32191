"""Errors of the store as answers."""

from collections.abc import Awaitable
from typing import TypeVar

from server.errors import ApiError, invalid, unavailable
from server.store.records import StoreFull, TooLong
from server.store.service import StoreUnavailable

Result = TypeVar("Result")


_TOO_LARGE = invalid("It is too large to be stored.", code="too_large")
TOO_MANY_IN_BACKGROUND = ApiError(
    429,
    "Too many background responses are being generated or followed; try again later.",
    code="rate_limit_exceeded",
    headers=(("retry-after", "1"),),
)


async def kept(waiting: Awaitable[Result], too_long: ApiError = _TOO_LARGE) -> Result:
    """Return what the store answers.

    Raises:
        ApiError: it does not work now; `too_long` if what it is asked for is more than it gives.
    """
    try:
        return await waiting
    except StoreUnavailable as error:
        raise unavailable("The response store is not available now; try again.") from error
    except (StoreFull, TooLong) as error:
        raise too_long from error
