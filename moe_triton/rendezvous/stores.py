"""What is used of a torch store, and how values in one that others reach are told from theirs."""

from __future__ import annotations

import hmac
import reprlib
from typing import Any, Protocol, cast

import torch.distributed as dist

from moe_triton.core.logs import RankLog, log_of

_log = log_of("stores")

# compare_set with this as both values reads a key that may not be there, without waiting for it.
_ABSENT = "absent"
_CODE = "sha256"
_CODE_CHARACTERS = 64
# How often what others put in a value's place is replaced before it is left there.
_MOST_REPLACED = 8


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


class Seal:
    """Codes of values that only those can make who know a secret, and which were found without.

    Args:
        secret: that the ranks share, and that no store sees.
        log: of this rank.
    """

    def __init__(self, secret: bytes, log: RankLog = _log) -> None:
        self._secret, self._log = secret, log
        self._said: set[str] = set()

    def put_on(self, key: str, value: bytes) -> bytes:
        """A value with its code, which is of its key, too: it is no other key's."""
        return hmac.digest(self._secret, key.encode() + b"\0" + value, _CODE).hex().encode() + value

    def taken_off(self, key: str, sealed: bytes) -> bytes | None:
        """The value, or None if none of the ranks wrote it, which is warned of once a key."""
        value = sealed[_CODE_CHARACTERS:]
        if hmac.compare_digest(self.put_on(key, value), sealed):
            return value
        if key not in self._said:
            self._said.add(key)
            self._log.warning(
                "the store that rank 0 hosts for this group holds %s as %s, which none of its ranks has "
                "written: ignored. Others reach that store: run jobs where only their ranks do.",
                reprlib.repr(sealed),
                key,
            )
        return None


class SealedStore:
    """Keys under a prefix of a store that others reach. What they write there counts as absent.

    Sums (`add`) are the store's own, and have no code.

    Args:
        store: with the prefix.
        prefix: of its keys.
        seal: of the ranks.
    """

    def __init__(self, store: Store, prefix: str, seal: Seal) -> None:
        self._store, self._prefix, self._seal = store, prefix, seal
        self._checked: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Writes a value."""
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """The value, as the last `check` has seen it if it did; empty if there is none."""
        return self._checked.pop(key) if key in self._checked else self._read(key) or b""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        if not self._store.check(keys):
            return False
        values = {key: self._read(key) for key in keys}
        self._checked = {key: value for key, value in values.items() if value is not None}
        return len(self._checked) == len(values)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes a value where another is, or where none is if that is empty. Returns what is there then."""
        before, after = self._sealed(key, expected) if expected else b"", self._sealed(key, desired)
        stored = self._compare_set(key, before, after)
        for _ in range(_MOST_REPLACED):
            if (value := self._seal.taken_off(self._name(key), stored)) is not None:
                return value
            if expected:
                break
            stored = self._compare_set(key, stored, after)
        return expected.encode()

    def add(self, key: str, number: int) -> int:
        """Adds to a sum, and returns it."""
        return self._store.add(key, number)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self._store.delete_key(key)

    def below(self, name: str) -> SealedStore:
        """Keys under a further prefix."""
        return SealedStore(_prefixed(self._store, name), self._name(name), self._seal)

    def _read(self, key: str) -> bytes | None:
        stored = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if stored == _ABSENT.encode() else self._seal.taken_off(self._name(key), stored)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        # Torch's stores take bytes, too: what others wrote need be no text.
        return self._store.compare_set(key, expected, desired)  # type: ignore[arg-type]

    def _sealed(self, key: str, value: bytes | str) -> bytes:
        return self._seal.put_on(self._name(key), value.encode() if isinstance(value, str) else value)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def below(store: Store, name: str) -> Store:
    """Keys under a prefix of a store."""
    return store.below(name) if isinstance(store, SealedStore) else _prefixed(store, name)


def _prefixed(store: Store, name: str) -> Store:
    return cast(Store, dist.PrefixStore(name, cast(Any, store)))  # type: ignore[attr-defined]
