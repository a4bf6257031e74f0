"""How ranks meet: small messages over the torch store of their group, each wait with a deadline.

Nothing is sent over the group itself: a receive that times out there breaks the connection for the group's
owner too. Messages are JSON. Nothing that a peer sends is unpickled.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_triton.attempts import Attempt, RoundGivenUpError, Store
from moe_triton.errors import ArgumentError, CommunicationTimeoutError, ConfigMismatchError

MAX_MESSAGE_BYTES = 1 << 16
# What the store may take for an answer once a deadline has passed.
_GRACE_S = 1.0
_ADDRESS_BYTES = 256

# Ours of each group that has met.
_stores: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


class Meeting:
    """Exchanges of small messages among the ranks of a group, or some of them.

    The first exchange joins an attempt (`moe_triton.attempts`), so a meeting that timed out is of no more
    use: those who try again construct a new one, and meet whoever comes late there.

    Args:
        group: a torch.distributed group.
        timeout_s: seconds that one exchange may take.
        members: the group's ranks that take part, in the order of their numbers here; None for all.

    Raises:
        ArgumentError: the group is not initialised, has one rank, or this rank is no member.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_s: float, members: Sequence[int] | None = None
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "group",
                group,
                "torch.distributed must be initialised",
                "Call torch.distributed.init_process_group('gloo', ...) first.",
            )
        self.group = group if group is not None else dist.group.WORLD
        rank = dist.get_rank(self.group)
        everyone = range(dist.get_world_size(self.group))
        self.members = tuple(everyone if members is None else members)
        self.num_ranks = len(self.members)
        self.rank = self.members.index(rank) if rank in self.members else -1
        if self.rank < 0:
            raise ArgumentError(
                "group",
                "a group without this process",
                "every caller must be a member",
                "Pass its own group.",
            )
        self.timeout_s = timeout_s
        self._attempt: Attempt | None = None

    def store(self) -> Store:
        """Where the ranks of this attempt, and nobody else, may leave something for each other."""
        assert self._attempt is not None  # they have met
        ours = cast(Any, _store_of(self.group, self.members))
        return cast(Store, dist.PrefixStore(f"left/{self._attempt.number}", ours))  # type: ignore[attr-defined]

    def world_ranks(self) -> tuple[int, ...]:
        """Each rank's number in torch.distributed's world, by its number here."""
        assert self.group is not None
        return tuple(dist.get_global_rank(self.group, member) for member in self.members)

    def exchange(
        self, message: Mapping[str, Any], purpose: str, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Sends a message to every rank and returns all of them, by rank.

        Args:
            message: what JSON can carry.
            purpose: for the error, and compared: ranks that meet for different ends are told so.
            timeout_s: seconds that it may take; None for the usual time.

        Raises:
            CommunicationTimeoutError: some ranks sent nothing in time, or the store did not answer.
            ConfigMismatchError: a rank sent what is no message, or met for another purpose.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        data = json.dumps({"purpose": purpose, "message": message}).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a rendezvous message takes {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}"
            )
        try:
            received = self._in_time(data, timeout_s)
        except RoundGivenUpError as error:
            detail = f"no message ({purpose}) within {timeout_s:g} s"
            if error.by != self.rank:
                detail = f"rank {error.by} gave up waiting ({purpose})"
            raise CommunicationTimeoutError("rendezvous", 0, 0, error.missing, detail) from None
        except (futures.TimeoutError, RuntimeError) as error:
            raise CommunicationTimeoutError(
                "rendezvous",
                0,
                0,
                (),
                f"the store of the process group does not answer ({purpose}): the process that hosts it, "
                f"usually that of rank 0, is stopped or gone ({type(error).__name__})",
            ) from error
        return [_decode(rank, data, purpose) for rank, data in enumerate(received)]

    def _in_time(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Runs an exchange in a thread: a store whose host is stopped does not even give an error."""
        done: futures.Future[list[bytes]] = futures.Future()
        cancelled = threading.Event()
        deadline = time.monotonic() + timeout_s

        def run() -> None:
            try:
                if self._attempt is None:
                    self._attempt = Attempt(_store_of(self.group, self.members), self.rank, self.num_ranks)
                done.set_result(self._attempt.exchange(data, deadline, cancelled))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="moe_triton rendezvous", daemon=True).start()
        try:
            return done.result(timeout_s + _GRACE_S)
        finally:
            cancelled.set()  # Ctrl-C: the others are told, and need not wait


def _decode(rank: int, data: bytes, purpose: str) -> dict[str, Any]:
    try:
        envelope = json.loads(data)
        sent_for, message = envelope["purpose"], envelope["message"]
    except (ValueError, KeyError, TypeError):
        raise ConfigMismatchError(f"rank {rank} sent {data[:40]!r}..., which is no message of ours") from None
    if sent_for != purpose:
        raise ConfigMismatchError(f"rank {rank} met for {sent_for!r}, this one for {purpose!r}")
    if not isinstance(message, dict):
        raise ConfigMismatchError(
            f"rank {rank} sent a message of type {type(message).__name__}, not a mapping"
        )
    return message


def _store_of(group: dist.ProcessGroup | None, members: Sequence[int]) -> Store:
    """The group's store, or one of ours where it has none, for these members alone."""
    assert group is not None
    if group not in _stores:
        found = distributed_c10d._get_process_group_store(group)
        # A connection of its own: requests of the group's owner do not queue behind ours.
        _stores[group] = _make_store(group) if found is None else found.clone()  # type: ignore[attr-defined]
    prefix = f"moe_triton/{'.'.join(str(member) for member in members)}"
    return cast(Store, dist.PrefixStore(prefix, _stores[group]))  # type: ignore[attr-defined]


def _make_store(group: dist.ProcessGroup) -> Any:
    """A store that the group's first rank hosts; its address goes over the group, once."""
    address = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    hosted = None
    if dist.get_rank(group) == 0:
        host = socket.gethostname()
        hosted = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        text = f"{host}:{hosted.port}".encode()
        address[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(address, group=group, group_src=0)
    if hosted is not None:
        return hosted
    host, port = bytes(address.tolist()).rstrip(b"\0").decode().rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
