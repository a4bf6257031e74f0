"""Plans that are kept for calls of the same shapes, up to a number of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from moe_triton.core.kept_memory import kept_bytes

LATEST = 8
"""Plans that are kept whatever they take: those that were made last."""


class Sized(Protocol):
    """What is kept."""

    @property
    def kept_bytes(self) -> int:
        """Memory that goes with it."""
        ...


Kept = TypeVar("Kept", bound=Sized)


class PlanCache(Generic[Kept]):
    """Plans by key; the oldest go where there is no room for a new one.

    One that is still used is made again then, which a call in thousands pays for; to note the use of plans
    would cost every call. Several threads may use it.

    Args:
        limit: bytes; None for what `moe_triton.core.kept_memory.kept_bytes` says when the first plan comes.

    Attributes:
        get: returns the plan of a key, or None.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._bytes = limit, 0
        self._plans: dict[Hashable, Kept] = {}
        self._lock = threading.Lock()
        # Not a method, which would take as long again in every call.
        self.get: Callable[[Hashable], Kept | None] = self._plans.get

    def __len__(self) -> int:
        return len(self._plans)

    def put(self, key: Hashable, plan: Kept) -> None:
        """Keeps a plan, in place of the oldest ones where there is no room for it."""
        dropped = []  # what goes with them goes after the lock is free
        with self._lock:
            if self._limit is None:
                self._limit = kept_bytes()
            before = self._plans.pop(key, None)
            self._bytes += plan.kept_bytes - (before.kept_bytes if before is not None else 0)
            self._plans[key] = plan
            while self._bytes > self._limit and len(self._plans) > LATEST:
                oldest = self._plans.pop(next(iter(self._plans)))
                self._bytes -= oldest.kept_bytes
                dropped.append(oldest)

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            dropped, self._bytes = list(self._plans.values()), 0
            self._plans.clear()
        dropped.clear()
