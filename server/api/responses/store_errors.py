"""What clients are told where the store does not do what they ask for."""

from collections.abc import Awaitable
from typing import TypeVar

from server.http.errors import ApiError, invalid, unavailable
from server.store.records import StoreFull, TooLong
from server.store.service import StoreUnavailable

Result = TypeVar("Result")


_TOO_LARGE = invalid("It is too large to be kept.", code="too_large")


async def kept(waiting: Awaitable[Result], too_long: ApiError = _TOO_LARGE) -> Result:
    """Return what the store answers.

    Raises:
        ApiError: it does not work now; `too_long` if what it is asked for is more than it gives.
    """
    try:
        return await waiting
    except StoreUnavailable as error:
        raise unavailable("What is kept cannot be reached now; try again.") from error
    except (StoreFull, TooLong) as error:
        raise too_long from error
