"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.patience import seconds

from .library import Library

THREAD_SECONDS = seconds(60)


class Ranks:
    """Runs the same on every rank and collects what goes wrong."""

    def __init__(self, library: Library, seed: int, number: int) -> None:
        self._library, self._seed, self._number = library, seed, number
        self._failures: list[BaseException] = []

    @property
    def have_failed(self) -> bool:
        """Whether any rank has: the others need not go on."""
        return bool(self._failures)

    def run(self, body: Callable[[int], None]) -> None:
        """``body(rank)`` on a thread per rank. Raises the first failure of any of them."""
        threads = [
            threading.Thread(target=self._guarded, args=(body, rank), daemon=True)
            for rank in range(self._number)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(THREAD_SECONDS)
            assert not thread.is_alive(), "a rank hangs past its deadline"
        if self._failures:
            raise self._failures[0]

    def _guarded(self, body: Callable[[int], None], rank: int) -> None:
        try:
            self._library.seed(self._seed * self._number + rank)
            body(rank)
        except BaseException as failure:
            self._failures.append(failure)
