"""What is used of a torch store."""

from __future__ import annotations

from typing import Protocol

# compare_set with this as both values reads a key that may not be there, without waiting for it.
_ABSENT = "absent"


class Store(Protocol):
    """The functions of a torch store that are used."""

    def set(self, key: str, value: bytes | str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # noqa: D102
    def add(self, key: str, number: int, /) -> int: ...  # noqa: D102
    def delete_key(self, key: str, /) -> bool: ...  # noqa: D102


def read_key(store: Store, name: str) -> str:
    """The value of a key, or "" if it is not there; never waits for it."""
    value = store.compare_set(name, _ABSENT, _ABSENT).decode(errors="replace")
    return "" if value == _ABSENT else value
