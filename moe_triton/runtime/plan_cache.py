"""Plans that are kept for calls of the same shapes, up to a number of bytes."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from moe_triton.core.kept_memory import kept_bytes

LATEST = 8
"""Plans that are kept whatever they take: of the latest calls."""


class Sized(Protocol):
    """What is kept."""

    @property
    def kept_bytes(self) -> int:
        """Memory that goes with it."""
        ...


Kept = TypeVar("Kept", bound=Sized)


class PlanCache(Generic[Kept]):
    """Plans by key; those used longest ago go first. Several threads may use it.

    Args:
        limit: bytes; None for what `moe_triton.core.kept_memory.kept_bytes` says when the first plan comes.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._bytes = limit, 0
        self._plans: OrderedDict[Hashable, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> Kept | None:
        """The plan of a key, which was used last from now on."""
        found = self._plans.get(key)
        if found is not None:
            with contextlib.suppress(KeyError):  # another thread has dropped it meanwhile
                self._plans.move_to_end(key)
        return found

    def put(self, key: Hashable, plan: Kept) -> None:
        """Keeps a plan, in place of those used longest ago where there is no room for it."""
        dropped = []  # what goes with them goes after the lock is free
        with self._lock:
            if self._limit is None:
                self._limit = kept_bytes()
            before = self._plans.pop(key, None)
            self._bytes += plan.kept_bytes - (before.kept_bytes if before is not None else 0)
            self._plans[key] = plan
            while self._bytes > self._limit and len(self._plans) > LATEST:
                _, oldest = self._plans.popitem(last=False)
                self._bytes -= oldest.kept_bytes
                dropped.append(oldest)

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            dropped, self._plans, self._bytes = self._plans, OrderedDict(), 0
        dropped.clear()
