"""How ranks meet: fixed-size messages over the torch.distributed group, each wait with a deadline.

Messages are JSON in byte tensors. Nothing that a peer sends is unpickled.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_triton.errors import ArgumentError, CommunicationTimeoutError, ConfigMismatchError

MESSAGE_BYTES = 8192


class Meeting:
    """Exchanges of small messages among the ranks of a group, or some of them.

    Args:
        group: a torch.distributed group with a CPU back end (gloo).
        timeout_s: seconds that one exchange may take.
        members: the group's ranks that take part, in the order of their numbers here; None for all.
        epoch: how often these members were reset together; the same on each of them.

    Raises:
        ArgumentError: the group is not initialised, has one rank, or has no CPU back end, or this rank is
            no member.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        members: Sequence[int] | None = None,
        epoch: int = 0,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "group",
                group,
                "torch.distributed must be initialised",
                "Call torch.distributed.init_process_group('gloo', ...) first.",
            )
        self.group = group if group is not None else dist.group.WORLD
        backend = dist.get_backend(self.group)
        if "gloo" not in str(backend):
            raise ArgumentError(
                "group",
                f"a {backend} group",
                "addresses are exchanged over a CPU back end",
                "Make the group with backend='gloo' or 'cpu:gloo,...'.",
            )
        rank = dist.get_rank(self.group)
        everyone = range(dist.get_world_size(self.group))
        self.members = tuple(everyone if members is None else members)
        # What an aborted exchange left, of other ranks or before a reset, must not be taken for ours.
        self._tag = zlib.crc32(repr((self.members, epoch)).encode()) & 0x7FFFFFFF
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
            purpose: for the error.
            timeout_s: seconds that it may take; None for the usual time.

        Raises:
            CommunicationTimeoutError: some ranks sent nothing in time; it names them.
        """
        mine = _encode(message)
        boxes = [mine if r == self.rank else torch.empty_like(mine) for r in range(self.num_ranks)]
        others = [r for r in range(self.num_ranks) if r != self.rank]
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        works: list[tuple[int, Any]] = []
        missing: set[int] = set()
        for rank in others:
            try:
                peer = self.members[rank]
                works.append((rank, dist.irecv(boxes[rank], group=self.group, group_src=peer, tag=self._tag)))
                works.append((rank, dist.isend(mine, group=self.group, group_dst=peer, tag=self._tag)))
            except RuntimeError:  # its process is gone: gloo knows at once
                missing.add(rank)
        # Sends too: one completes only when its receiver takes it.
        missing |= {rank for rank, work in works if rank not in missing and not _arrived(work, deadline)}
        if missing:
            raise CommunicationTimeoutError(
                "rendezvous", 0, 0, sorted(missing), f"no message ({purpose}) within {timeout_s:g} s"
            )
        return [_decode(box) for box in boxes]


def _encode(message: Mapping[str, Any]) -> torch.Tensor:
    data = json.dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a rendezvous message takes {len(data)} bytes, the limit is {MESSAGE_BYTES}")
    return torch.frombuffer(bytearray(data.ljust(MESSAGE_BYTES)), dtype=torch.uint8)


def _decode(box: torch.Tensor) -> dict[str, Any]:
    message = json.loads(bytes(box.tolist()))
    if not isinstance(message, dict):
        raise ConfigMismatchError(f"a peer sent a message of type {type(message).__name__}, not a mapping")
    return message


def _arrived(work: Any, deadline: float) -> bool:
    left = max(deadline - time.monotonic(), 0.001)
    try:
        work.wait(timedelta(seconds=left))
    except RuntimeError:
        return False
    return True
