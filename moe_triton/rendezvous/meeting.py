"""How ranks meet: small messages over the torch store of their group, each wait with a deadline.

Nothing is sent over the group itself: a receive that times out there breaks the connection for the group's
owner too. Messages are JSON; nothing from a peer is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_triton.core.errors import (
    INVALID_ARGUMENT,
    ArgumentError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    MoeTritonError,
    RankLostError,
    ThreadError,
)
from moe_triton.core.logs import log_of
from moe_triton.core.network import Network
from moe_triton.core.threads import Deadline, in_thread
from moe_triton.rendezvous import attempts
from moe_triton.rendezvous.attempts import Attempt
from moe_triton.rendezvous.hosting import host_store
from moe_triton.rendezvous.membership import Membership, Past
from moe_triton.rendezvous.notes import ASK_S, Culprits
from moe_triton.rendezvous.stores import Seal, SealedStore, Store, below

MAX_MESSAGE_BYTES = 1 << 16
MAX_REASON = 2000  # characters of one
# Time for the store's answer after a deadline has passed.
_GRACE_S = 1.0
# For another sign of a loss to come here: the store is gone whose host it was, or somebody has given up.
_NOTICED_S = 0.25
# How often an exchange is looked at, and its deadline, which moves where this process was stopped.
_LONGEST_LOOK_S = 0.05
# How long a refusing rank waits until the others know: its process may host the store, and exit.
_LINGER_S, _HURRY_S, _LINGER_PAUSE_S = 1.0, 0.2, 0.005

# Our connection of each group that has met.
_stores: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
# Of those whose store we host: others may reach it.
_seals: WeakKeyDictionary[dist.ProcessGroup, Seal] = WeakKeyDictionary()
_connecting: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()
# The latest exchange of each group that its caller did not wait out, after Ctrl-C or a time-out.
_left: WeakKeyDictionary[dist.ProcessGroup, futures.Future[Any]] = WeakKeyDictionary()
_pasts: WeakKeyDictionary[dist.ProcessGroup, Past] = WeakKeyDictionary()
# Connections of the process that this one was forked from.
_stores_of_parent: list[object] = []
_of_parent: WeakSet[dist.ProcessGroup] = WeakSet()

Value = TypeVar("Value")
_timed_out = partial(CommunicationTimeoutError, "rendezvous", 0, 0)


def _after_fork() -> None:
    """Connections belong to the parent: requests of both would mix, so they are not used here."""
    global _stores
    # Nor destroyed: a store hosted by the parent would wait for its thread, which does not exist here.
    _stores_of_parent.append(_stores)
    _stores = WeakKeyDictionary()
    if dist.is_available() and dist.is_initialized():
        _of_parent.update(group for group in distributed_c10d._world.pg_map if group is not None)


os.register_at_fork(after_in_child=_after_fork)


class Meeting:
    """Exchanges of small messages among the ranks of a group, or some of them; or of one process by itself.

    The first exchange joins an attempt (`moe_triton.rendezvous.attempts`), so a meeting that has timed out
    cannot be
    used again: ranks that try again construct a new one, and meet late ranks there.

    It does not keep the group: a group whose threads still run when Python ends may take the process with it.
    Of its store it keeps a connection, until `leave`.

    Args:
        group: a torch.distributed group; None for the default one, or without any for this process alone.
        timeout_s: seconds that one exchange may take.
        members: the group's ranks that take part, in the order of their numbers here; None for all.
        argument: that says who does not take part, for messages.

    Attributes:
        of_group: every rank of the group.
        hosts: the number of each rank's host; all 0 until that is known (`moe_triton.rendezvous.hosts`).
        network: by which its hosts reach each other.
        beside: why a rank that is missing may be stuck elsewhere, where its other meetings are not seen here;
            or "".

    Raises:
        ArgumentError: it is no group, is not initialised, belongs to the process that this one was forked
            from, or does not contain this rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        members: Sequence[int] | None = None,
        argument: str = "lost_ranks",
    ) -> None:
        process_group, rank, size = _checked(group)
        self._group: Callable[[], dist.ProcessGroup | None] | None
        self._group = None if process_group is None else weakref.ref(process_group)
        self._store: Store | None = None
        self._argument = argument
        self.of_group = range(size)
        self.members = tuple(self.of_group if members is None else members)
        self.num_ranks = len(self.members)
        self.rank = self.members.index(rank) if rank in self.members else -1
        if self.rank < 0:
            raise _not_a_member()
        self.timeout_s = timeout_s
        self.hosts, self.network = (0,) * self.num_ranks, Network()
        self.beside = ""
        self._attempt: Attempt | None = None
        self._exchanging: futures.Future[list[bytes]] | None = None
        self._is_over = False
        self._why, self._cancelled = "", threading.Event()
        self._lost: dict[int, str] = {}  # what has become of whom
        self._loss = threading.Event()
        self._last: tuple[str, float] | None = None  # purpose and time of the last exchange

    @property
    def hosts_of_group(self) -> tuple[int | None, ...]:
        """The number of the host of each rank of the group, as far as that is known; None of lost ones."""
        known = dict(zip(self.members, self.hosts, strict=True))
        return tuple(known.get(rank) for rank in self.of_group)

    @property
    def num_beside(self) -> int:
        """How many ranks are on this rank's host, itself included."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def num_hosts(self) -> int:
        """On how many hosts its ranks are, as far as that is known."""
        return len(set(self.hosts))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, while it exists; None for this process alone."""
        return None if self._group is None else self._group()

    def store(self, number: int | None = None) -> Store:
        """A store for the ranks of this attempt only; or of an earlier one of the same ranks, by its number.

        Raises:
            RuntimeError: this rank has left.
        """
        attempt, ours = self._attempt, self._store
        if attempt is None or ours is None:
            raise RuntimeError("this rank has left the meeting")
        return below(ours, f"left/{attempt.number if number is None else number}")

    @property
    def number(self) -> int:
        """The number of the attempt in which the ranks have met: another one each time that they meet."""
        assert self._attempt is not None
        return self._attempt.number

    def world_ranks(self) -> tuple[int, ...]:
        """Each rank's number in torch.distributed's world, by its number here."""
        if (group := self._standing_group()) is None:
            return self.members
        return tuple(dist.get_global_rank(group, member) for member in self.members)

    def leave(self) -> None:
        """Lets go of the group's store. Nothing is exchanged any more."""
        self.end()
        self._attempt = self._store = None
        self._group = _gone

    def exchange(
        self, message: Mapping[str, Any], purpose: str, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Sends a message to every rank and returns all of them, by rank.

        Args:
            message: what JSON can carry.
            purpose: for errors; also compared between ranks.
            timeout_s: seconds that it may take; None for the meeting's.

        Raises:
            RankLostError: a rank is lost (`lose`) whose message was not there.
            CommunicationTimeoutError: some ranks sent nothing in time, or the store did not answer.
            ConfigMismatchError: a rank cannot go on, sent an invalid message, or meets for another purpose;
                or others write to the store.
            ThreadError: this process can start no thread; the others are told.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        data = json.dumps({"purpose": purpose, "message": message}).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a rendezvous message takes {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}"
            )
        try:
            received = self._in_time(data, timeout_s)
        except ThreadError as error:
            self.refuse(error)
            raise
        except attempts.RefusedError as error:
            self.end()
            raise ConfigMismatchError(f"rank {error.by} cannot be constructed: {error.reason}") from None
        except attempts.MetElsewhereError as error:
            self.end()
            raise ConfigMismatchError(str(error)) from None
        except attempts.BadStateError as error:
            self.end()
            raise ConfigMismatchError(
                f"the store of the process group holds {reprlib.repr(error.value)} as {error.key}, below "
                f"moe_triton/, which no rank of this version writes ({purpose}). Keep other programs away "
                "from the store, install the same moe_triton on all ranks, and start the job again."
            ) from None
        except attempts.RoundGivenUpError as error:
            self.end()
            if self._why:
                raise ConfigMismatchError(self._why) from None
            if error.by != self.rank and self._last is not None:
                self._loss.wait(_NOTICED_S)  # what made the other give up may be seen here a moment later
            if self._lost and set(error.culprits.ranks) <= set(self._lost):
                raise self._lost_error(purpose) from None
            detail = f"no message ({purpose}) within {timeout_s:g} s"
            if error.by != self.rank:
                detail = f"rank {error.by} gave up waiting ({purpose})"
            culprits = error.culprits
            if self.beside and error.by not in culprits.ranks:
                culprits = Culprits.unknown(culprits.ranks, self.beside, culprits.said)
            detail += self._since() + (f". {culprits.said.rstrip()}" if culprits.said else "")
            uncertain, why = culprits.uncertain, culprits.why
            raise _timed_out(culprits.ranks, detail, uncertain_ranks=uncertain, uncertainty=why) from None
        except (futures.TimeoutError, RuntimeError) as error:
            self.end()
            if self._last is not None and self._loss.wait(_NOTICED_S):
                raise self._lost_error(purpose) from error
            if (group := self.group) is None or group in _stores:
                why = (
                    f"does not answer ({purpose}): the process that hosts it, usually that of rank 0, is "
                    f"stopped or gone ({type(error).__name__})"
                )
            else:
                why = (
                    f"is not there ({purpose}): torch made none, and to make one all ranks of the group must "
                    "come, of which one is late, stopped or gone"
                )
            raise _timed_out((), f"the store of the process group {why}") from error
        self._last = purpose, time.monotonic()
        return [_decode(rank, data, purpose) for rank, data in enumerate(received)]

    def _lost_error(self, purpose: str) -> RankLostError:
        lost = dict(sorted(self._lost.items()))
        said = "; ".join(f"rank {rank} {why}" for rank, why in lost.items())
        detail = (
            f"{said}, while ranks met ({purpose}){self._since()}. Construct it without those that are lost."
        )
        return RankLostError("rendezvous", 0, 0, tuple(lost), detail)

    def _since(self) -> str:
        """The time since the last exchange, for an error."""
        if self._last is None:
            return ""
        purpose, at = self._last
        return f"; all ranks had met {time.monotonic() - at:.1f} s before ({purpose})"

    def end(self) -> None:
        """Marks that no rank waits for this one any more: `refuse` does nothing from now on."""
        self._is_over = True

    def stop(self, why: str) -> None:
        """Gives up waiting for members that have not come at all; `exchange` says why. From any thread."""
        if self._last is None:
            self._why = why
            self._cancelled.set()

    def lose(self, rank: int, why: str) -> None:
        """Gives up waiting for a rank whose process has ended; `exchange` names it. From any thread.

        Args:
            rank: its number here.
            why: what has become of it, behind its name.
        """
        self._lost.setdefault(rank, why)
        self._loss.set()
        self._cancelled.set()

    def refuse(self, error: BaseException) -> None:
        """Tells the other ranks, which wait for this one now or later, why it does not go on.

        Returns once all know, or after `_LINGER_S`.

        Args:
            error: the reason.
        """
        if self._is_over:
            return
        self.end()
        linger_s, grace_s = _LINGER_S, _GRACE_S
        if not isinstance(error, Exception):  # Ctrl-C
            linger_s = grace_s = _HURRY_S

        def tell() -> None:
            if self._exchanging is not None:
                futures.wait([self._exchanging])  # an exchange that was interrupted
            attempt = self._attempt or self._make_attempt()
            if not (key := attempt.refuse(reason_of(error))):
                return
            deadline = time.monotonic() + linger_s
            while attempt.told(key) < self.num_ranks and time.monotonic() < deadline:
                time.sleep(_LINGER_PAUSE_S)

        # If the store does not answer, the others cannot be told.
        telling = in_thread(tell, "refusal")
        futures.wait([telling], linger_s + grace_s)
        if telling.done() and isinstance(telling.exception(), ThreadError):
            # Here, then, and without a deadline: only a store whose host is stopped would not answer.
            with contextlib.suppress(Exception):
                tell()

    def _standing_group(self) -> dist.ProcessGroup | None:
        """The group; None for this process alone.

        Raises:
            RuntimeError: it does not exist any more.
        """
        group = self.group
        if group is None and self._group is not None:
            raise RuntimeError("the process group is destroyed")
        return group

    def _make_attempt(self) -> Attempt:
        if (group := self._standing_group()) is None:
            self._store, membership = cast(Store, dist.HashStore()), None  # type: ignore[attr-defined]
        else:
            shared, past = shared_store_of(group), _pasts.setdefault(group, Past())
            own, size = self.members[self.rank], len(self.of_group)
            membership = Membership(shared, past, own, self.members, size, self._argument)
            self._store = _store_of(group, self.members)
        return Attempt(self._store, self.rank, self.num_ranks, membership)

    def _in_time(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Runs an exchange in a thread, since requests to a store whose host has stopped never return."""
        cancelled = self._cancelled = threading.Event()
        if self._why or self._lost:
            cancelled.set()
        deadline = Deadline(timeout_s)
        group = self.group
        left = _left.get(group) if group is not None else None

        def run() -> list[bytes]:
            # It still has its attempt to give up, which this one would join otherwise.
            if left is not None:
                futures.wait([left], timeout_s)
            if self._attempt is None:
                self._attempt = self._make_attempt()
            return self._attempt.exchange(data, deadline, cancelled, self._lost)

        self._exchanging = in_thread(run, "rendezvous")
        try:
            return _outcome(self._exchanging, deadline, _GRACE_S + ASK_S)
        except futures.TimeoutError:
            raise
        except BaseException:  # Ctrl-C, or what another signal's handler raises
            cancelled.set()  # so that the others need not wait
            # Who comes after what the caller does next must not meet what it has left.
            futures.wait([self._exchanging], _GRACE_S)
            raise
        finally:
            cancelled.set()
            if self._exchanging.done():  # an error in it would keep its callers' tensors alive
                self._exchanging = None
            elif group is not None:
                _left[group] = self._exchanging
                self._exchanging.add_done_callback(partial(_forget_left, weakref.ref(group)))


def _gone() -> None:
    """In place of a reference to a group, once it is of no concern."""


def _forget_left(group: Callable[[], dist.ProcessGroup | None], _: object) -> None:
    """What was left of this group has ended. The thread that it ran in may outlive the group."""
    if (process_group := group()) is not None:
        _left.pop(process_group, None)


def _outcome(exchanging: futures.Future[list[bytes]], deadline: Deadline, grace_s: float) -> list[bytes]:
    """What an exchange returns.

    Raises:
        TimeoutError: it has not ended some seconds after its deadline: its store does not answer.
    """
    while True:
        left = deadline.left() + grace_s
        try:
            return exchanging.result(min(max(left, 0.0), _LONGEST_LOOK_S))
        except futures.TimeoutError:
            if left <= 0 or exchanging.done():
                raise


def reason_of(error: BaseException) -> str:
    """An error as peers report it."""
    try:
        text = str(error)
    except Exception:
        text = ""
    if not isinstance(error, MoeTritonError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def values_of(messages: Sequence[Mapping[str, Any]], name: str, kind: type[Value]) -> list[Value]:
    """The value of a name in each rank's message.

    Args:
        messages: of an exchange.
        name: of the value.
        kind: type that each value must have.

    Raises:
        ConfigMismatchError: a rank sent a value of another type, or none.
    """
    values: list[Value] = []
    for rank, message in enumerate(messages):
        value = message.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            shown = reprlib.repr(value)
            raise ConfigMismatchError(f"rank {rank} sent {name} {shown}, which is no {kind.__name__}")
        values.append(value)
    return values


def _is_alone() -> bool:
    """Whether there are no other ranks: nothing is initialised, and no launcher says that there will be."""
    return dist.is_available() and not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") == "1"


def _checked(group: object) -> tuple[dist.ProcessGroup | None, int, int]:
    """A group, this process's rank in it, and its size; no group for one process by itself."""
    if group is None and _is_alone():
        return None, 0, 1
    shown = "None" if group is None else f"a {type(group).__name__}"
    if not dist.is_available() or not dist.is_initialized():
        remedy = "Call torch.distributed.init_process_group('gloo', ...) first."
        raise ArgumentError("group", shown, "torch.distributed must be initialised", remedy)
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:  # new_group on other ranks
        raise _not_a_member()
    process_group = dist.group.WORLD if group is None else group
    if not isinstance(process_group, dist.ProcessGroup):
        rule = "it must be a torch.distributed process group, or None for the default one"
        raise _invalid(shown, rule, "Pass what new_group returned, or a mesh's get_group().")
    if process_group in _of_parent:
        raise _invalid(
            "of the process that this one was forked from",
            "its connections are that process's",
            "Start processes that use groups by spawn or forkserver, or initialise torch.distributed here.",
        )
    try:
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    except (ValueError, RuntimeError, KeyError):  # destroyed, or never registered
        rule = "it must be a process group that is not destroyed"
        raise _invalid("not one of torch.distributed's", rule, "Pass what new_group returned.") from None
    if rank < 0:
        raise _not_a_member()
    return process_group, rank, size


def _invalid(value: str, rule: str, remedy: str) -> ArgumentError:
    return ArgumentError("group", value, rule, remedy, code=INVALID_ARGUMENT)


def _not_a_member() -> ArgumentError:
    rule = "every caller must be a member"
    return ArgumentError("group", "a group without this process", rule, "Pass its own group.")


def _decode(rank: int, data: bytes, purpose: str) -> dict[str, Any]:
    try:
        envelope = json.loads(data)
        sent_for, message = envelope["purpose"], envelope["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigMismatchError(f"rank {rank} sent {data[:40]!r}..., which is no message of ours") from None
    if sent_for != purpose:
        raise ConfigMismatchError(f"rank {rank} met for {reprlib.repr(sent_for)}, this one for {purpose!r}")
    if not isinstance(message, dict):
        raise ConfigMismatchError(
            f"rank {rank} sent a message of type {type(message).__name__}, not a mapping"
        )
    return message


def _store_of(group: dist.ProcessGroup, members: Sequence[int]) -> Store:
    """The group's store, or our own if it has none, for these members only."""
    return _under(group, ".".join(str(member) for member in members))


def shared_store_of(group: dist.ProcessGroup) -> Store:
    """The same store for all ranks of a group, whoever they meet."""
    return _under(group, "all")


def _connect(group: dist.ProcessGroup) -> None:
    if (store := distributed_c10d._get_process_group_store(group)) is None:
        hosted = host_store(group)
        log = log_of("stores", rank=group.rank(), num_ranks=group.size())
        _seals[group], _stores[group] = Seal(hosted.secret, log), hosted.store
    else:
        # A separate connection, so that requests of the group's owner do not queue behind ours.
        _stores[group] = store.clone()  # type: ignore[attr-defined]


def _under(group: dist.ProcessGroup, name: str) -> Store:
    """What is under a name in the group's store: all that ranks write there goes through here."""
    # One at a time: who has given up waiting for a late rank is still in the collectives that make a store,
    # and whoever tries again must not begin them anew.
    with _connecting.setdefault(group, threading.Lock()):
        if group not in _stores:
            _connect(group)
    prefix = f"moe_triton/{name}"
    store = cast(Store, dist.PrefixStore(prefix, _stores[group]))  # type: ignore[attr-defined]
    return SealedStore(store, prefix, _seals[group]) if group in _seals else store
