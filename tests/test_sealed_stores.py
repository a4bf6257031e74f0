"""What ranks read where others write, too."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from moe_triton.rendezvous.stores import Seal, SealedStore, read_key

SECRET, OTHER = bytes(range(32)), bytes(32)


class Stores:
    """Two ranks of one store, somebody who does not know their secret, and the store as it is."""

    def __init__(self) -> None:
        self.raw = dist.PrefixStore("p", dist.HashStore())  # type: ignore[attr-defined]
        self.first, self.second, self.other = (self._sealed(secret) for secret in (SECRET, SECRET, OTHER))

    def _sealed(self, secret: bytes) -> SealedStore:
        return SealedStore(self.raw, "p", Seal(secret))


@pytest.fixture
def stores() -> Stores:
    return Stores()


def test_ranks_read_what_ranks_wrote(stores: Stores) -> None:
    stores.first.set("key", "text \u00e4")
    stores.second.set("bytes", b"\xff\0")
    assert read_key(stores.second, "key") == "text \u00e4"
    assert stores.first.check(["key", "bytes"])
    assert stores.first.get("bytes") == b"\xff\0"
    assert not stores.first.check(["key", "absent"])
    assert read_key(stores.first, "absent") == ""
    assert stores.first.add("sum", 2) + stores.second.add("sum", 3) == 2 + 5
    assert stores.second.delete_key("key")
    assert read_key(stores.first, "key") == ""
    assert SECRET not in stores.raw.get("bytes")


def test_a_value_changes_once(stores: Stores) -> None:
    assert stores.first.compare_set("key", "", "one") == b"one"
    assert stores.second.compare_set("key", "", "two") == b"one"
    assert stores.second.compare_set("key", "one", "two") == b"two"
    assert stores.first.compare_set("key", "one", "three") == b"two"
    assert stores.first.compare_set("absent", "one", "two") == b"one"  # as torch's stores have it
    assert not stores.first.check(["absent"])


FORGED = {
    "plain": lambda stores: stores.raw.set("key", "lies"),
    "empty": lambda stores: stores.raw.set("key", ""),
    "no text": lambda stores: stores.raw.set("key", b"\xff" * 100),
    "another secret": lambda stores: stores.other.set("key", "lies"),
    "a code": lambda stores: stores.raw.set("key", "0" * 64 + "lies"),
    "of another key": lambda stores: stores.raw.set("key", stores.raw.get("kept")),
    "changed": lambda stores: stores.raw.set("key", stores.raw.get("kept") + b"x"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_what_others_wrote_counts_as_absent_and_is_said_once(
    stores: Stores, forged: str, caplog: pytest.LogCaptureFixture
) -> None:
    stores.first.set("kept", "right")
    FORGED[forged](stores)
    for _ in range(2):
        assert read_key(stores.first, "key") == ""
        assert not stores.first.check(["kept", "key"])
        assert stores.first.get("key") == b""
        assert stores.first.compare_set("key", "before", "after") == b"before"
    assert ["p/key, which none of its ranks has written: ignored" in text for text in caplog.messages] == [
        True
    ]
    assert stores.first.compare_set("key", "", "right") == b"right"  # in its place
    assert read_key(stores.second, "key") == "right"
    assert stores.second.check(["kept", "key"])


def test_what_was_seen_to_be_there_is_what_is_got(stores: Stores) -> None:
    stores.first.set("key", "right")
    assert stores.second.check(["key"])
    stores.raw.set("key", "lies")
    assert stores.second.get("key") == b"right"


def test_somebody_who_writes_all_the_time_holds_nobody_up(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores.first, "_compare_set", lambda *_: b"lies")
    assert stores.first.compare_set("key", "", "right") == b""
