"""What SGLang's threads hear when a call fails: a miss of the right length, and never an exception."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def answers(miss: Callable[..., Any]) -> Callable[[F], F]:
    """Make a method answer ``miss(self, *arguments)`` instead of raising."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("%s failed; it counts as a miss", method.__name__)
                return miss(*args, **kwargs)

        return cast("F", guarded)

    return decorate


def no_page(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    """No page was moved."""
    return [False] * len(keys)


def no_tensor(keys: Sequence[str], *_: Any, **__: Any) -> list[None]:
    """No tensor was filled."""
    return [None] * len(keys)


def no_pool(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[Any, list[bool]]:
    """No page of any pool was moved."""
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}
