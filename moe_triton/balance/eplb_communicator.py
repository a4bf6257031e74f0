"""`EplbCommunicator`: carries experts' weights where a framework plans the moves, as vLLM asks for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from moe_triton.balance.adopted import bytes_of, check_apart, order_of
from moe_triton.balance.arguments import check_at_least
from moe_triton.balance.carriers import Region, make_stage
from moe_triton.balance.stage import Bytes, digest_of
from moe_triton.balance.weights import STAGE_BYTES, check_buffer, ring_bytes_of
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import check_seconds, shown
from moe_triton.core.errors import (
    INVALID_ARGUMENT,
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
)
from moe_triton.core.threads import Deadline

NO_ID = -1  # of an expert, in the older form
HEAD_WORDS = 4  # in front of each expert: which message of the pair, whose, how many bytes, of what form
LAST_ID = 1 << 62
PIECE_BYTES = 1 << 18  # the other side copies one while the next is made
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3
DONE = -1  # instead of bytes
CLOSED, FAILED = 1, 2  # what a rank says of itself


class Message(NamedTuple):
    """An expert's tensors, to or from a rank.

    Attributes:
        expert: its id.
        parts: their bytes.
        form: stands for their shapes, dtypes, and the order of their dimensions in memory.
    """

    expert: int
    parts: list[Bytes]
    form: int

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(map(len, self.parts))


class EplbCommunicator:
    """Sends and receives weights of experts between the ranks of a buffer, beside its dispatches.

    What vLLM calls while it rearranges experts (``vllm/distributed/eplb/eplb_communicator.py``): the tensors
    that go and come are named one expert after the other, and `execute` moves them. It is no collective: a
    rank that has nothing to move returns at once. Any thread may call it, one at a time.

    Both sides name the same experts, by tensors of the same shapes, dtypes and order in memory. With ids
    their order does not matter; without, in the older form of vLLM, experts of a pair come in the order in
    which they were named.

    Args:
        buffer: whose ranks they are. Collective: every rank makes one.
        stage_bytes: of the memory through which weights go, on each rank.
        timeout_s: that `execute` waits for another rank to go on, 1e-6 to 1e9.

    Raises:
        ArgumentError: a bad argument.
        ConfigMismatchError: ranks disagree.
        WindowError: no memory for it.
        CommunicationTimeoutError: a rank did not come.

    Examples:
        >>> communicator = EplbCommunicator(buffer)
        >>> other = 1 - buffer.rank
        >>> w = torch.full((2, 3), float(buffer.rank))
        >>> came = torch.empty(2, 3)
        >>> communicator.add_send([w], other, expert_id=4)
        >>> communicator.add_recv([came], other, expert_id=4)
        >>> communicator.execute()
        >>> came[0, 0].item() == other
        True
        >>> communicator.close()
    """

    def __init__(self, buffer: EPBuffer, *, stage_bytes: int = STAGE_BYTES, timeout_s: float = 60.0) -> None:
        check_buffer(buffer)
        self._rank, self._num_ranks = buffer.rank, buffer.config.num_ranks
        self._device = buffer.device
        made: list[int] = []

        def asked() -> tuple[int, dict[str, Any]]:
            self._timeout_s = check_seconds("timeout_s", timeout_s)
            made.append(ring_bytes_of(stage_bytes, self._num_ranks))
            return Region.num_bytes(self._num_ranks, made[0]), {"ring_bytes": made[0]}

        self._memory = memory = buffer.peer_memory(asked, lambda: Region.out_bytes(self._num_ranks, made[0]))
        self._copies = memory.copies
        region = Region(memory, 0, self._rank, self._num_ranks, made[0])
        self._stage = make_stage(region, buffer, f"experts/{memory.number}")
        self._lock = threading.Lock()
        self._going: dict[int, list[Message]] = {}
        self._coming: dict[int, list[Message]] = {}
        # By rank, how many messages went to it or came from it.
        self._sent = [0] * self._num_ranks
        self._got = [0] * self._num_ranks
        self._executed = 0
        self._heads: list[torch.Tensor] = []
        self._broken = ""
        self._stream: object = None

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        """False: all its memory is taken when it is made."""
        return False

    def set_stream(self, cuda_stream: object) -> None:
        """Takes a stream as vLLM passes it: what it was given before `execute` is waited for there.

        What comes is there when `execute` returns, for any stream.
        """
        self._stream = cuda_stream

    def set_transfer_context(self, old_indices: object = None, layer_idx: int | None = None) -> None:
        """Takes what vLLM of summer 2026 says before a layer. Nothing is needed of it."""

    def add_send(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], dst_rank: int, expert_id: int | None = None
    ) -> None:
        """Names what the next `execute` sends. It is read then, and must not be written before it returns.

        Args:
            tensors: of an expert, dense, on the buffer's device; one alone in vLLM's older form.
            dst_rank: number in the buffer's group.
            expert_id: a number that both sides give it; None in the older form.

        Raises:
            ArgumentError: a bad argument; nothing is sent of it.
            BufferStateError: it is closed, broken, or used by another thread.
        """
        self._add(self._going, "dst_rank", tensors, dst_rank, expert_id)

    def add_recv(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], src_rank: int, expert_id: int | None = None
    ) -> None:
        """Names what the next `execute` receives, and where to.

        Args:
            tensors: of an expert, dense, on the buffer's device, as many and as large as those that are sent.
            src_rank: number in the buffer's group.
            expert_id: as the sender has it.

        Raises:
            ArgumentError: a bad argument; nothing is received of it.
            BufferStateError: it is closed, broken, or used by another thread.
        """
        self._add(self._coming, "src_rank", tensors, src_rank, expert_id)

    def execute(self, old_indices: object = None) -> None:
        """Moves all that was named since the last time, and returns once this rank's part is there.

        Args:
            old_indices: what vLLM passes for communicators that look up where an expert lies. Not needed.

        Raises:
            ArgumentError: tensors that are received share memory with others, or what goes to this rank
                itself is not what is to come from it. Nothing was sent.
            BufferStateError: it is closed, broken, or used by another thread; or so on a rank that was named.
            ConfigMismatchError: another expert came than was named, or of another form.
            CommunicationTimeoutError: a rank did not go on. After any of these it is broken if other ranks
                were named, and they hear of it at once. Close it on every rank, and load weights anew.
        """
        with self._alone():
            going, self._going = self._going, {}
            coming, self._coming = self._coming, {}
            number = self._executed
            self._executed += 1
            is_alone = not {*going, *coming} - {self._rank}
            try:
                _check_targets(going, coming)
                _check_own(going.get(self._rank, []), coming.get(self._rank, []))
                self._move(number, going, coming)
            except BaseException as error:
                if not (is_alone and isinstance(error, ArgumentError)):  # others may wait for this rank
                    self._broken = f"move {number} failed ({type(error).__name__})"
                    self._stage.say(FAILED)
                raise

    def close(self) -> None:
        """Gives its memory back. May be called twice."""
        is_whole = not self._broken
        self._broken = self._broken or "it is closed"
        if is_whole:
            with contextlib.suppress(BufferStateError, RuntimeError):  # closed before; or no store any more
                self._stage.say(CLOSED)
        self._memory.close()

    def _add(
        self, queues: dict[int, list[Message]], name: str, tensors: object, rank: object, expert_id: object
    ) -> None:
        with self._alone():
            number = check_at_least(name, rank, 0)
            if number >= self._num_ranks:
                rule = f"the buffer has {self._num_ranks} ranks"
                raise ArgumentError(name, number, rule, "Pass the rank's number in the buffer's group.")
            expert = NO_ID if expert_id is None else check_at_least("expert_id", expert_id, 0)
            if expert > LAST_ID:
                raise ArgumentError("expert_id", expert, f"the last one is {LAST_ID}", "Count from 0.")
            given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            if not isinstance(given, (list, tuple)) or not given:
                rule = "it has the tensors of an expert"
                raise ArgumentError("tensors", shown(tensors), rule, "Pass a list.", code=INVALID_ARGUMENT)
            parts = [bytes_of(f"tensors[{n}]", each, self._device) for n, each in enumerate(given)]
            queues.setdefault(number, []).append(Message(expert, parts, _form_of(given)))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise BufferStateError("another thread is inside this communicator; calls must not overlap")
        try:
            if self._broken:
                raise BufferStateError(f"{self._broken}. Close it on every rank, and make a new one.")
            yield
        finally:
            self._lock.release()

    def _move(self, number: int, going: dict[int, list[Message]], coming: dict[int, list[Message]]) -> None:
        left = [(rank, self._send(rank, messages)) for rank, messages in going.items()]
        left += [(rank, self._receive(rank, messages)) for rank, messages in coming.items()]
        if not left:
            return
        pause, deadline = SHORTEST_PAUSE_S, Deadline(self._timeout_s)
        named = sorted({*going, *coming} - {self._rank})
        self._copies.follow(self._stream)
        self._stage.refresh()
        self._look_at_failures(number, named)
        self._look(number, sorted(going), deadline)  # what comes from one that has closed may be there
        while left:
            turns = [(rank, stream, next(stream, DONE)) for rank, stream in left]
            left = [(rank, stream) for rank, stream, moved in turns if moved != DONE]
            self._copies.wait()
            if any(moved for _, _, moved in turns):
                pause, deadline = SHORTEST_PAUSE_S, Deadline(self._timeout_s)
            else:
                self._look(number, sorted({rank for rank, _ in left}), deadline)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            self._stage.refresh()
        while not self._stage.is_told():
            self._check_time(number, named, deadline)
            time.sleep(SHORTEST_PAUSE_S)
            self._stage.refresh()
        self._heads.clear()
        # What went may still be in the stage of one that does not want it. One that has closed has had all.
        self._look_at_failures(number, named)

    def _look_at_failures(self, number: int, ranks: list[int]) -> None:
        if failed := [rank for rank in ranks if self._stage.state(rank) == FAILED]:
            raise BufferStateError(
                f"a move of rank(s) {failed} has failed, with which this rank moves weights in {number}. "
                "Close it on every rank."
            )

    def _look(self, number: int, ranks: list[int], deadline: Deadline) -> None:
        """Raises where nothing will come of waiting for ranks."""
        if gone := [rank for rank in ranks if self._stage.state(rank)]:
            raise BufferStateError(
                f"rank(s) {gone} have closed this communicator, or a move of theirs has failed, while this "
                f"rank waited for them in move {number}. Close it on every rank."
            )
        self._check_time(number, ranks, deadline)

    def _check_time(self, number: int, ranks: list[int], deadline: Deadline) -> None:
        if deadline.left() <= 0:
            rule = "they have died or stopped, or named nothing to go or come. Name it on both sides."
            raise CommunicationTimeoutError("moving weights", number, 0, ranks, rule)

    def _send(self, rank: int, messages: Sequence[Message]) -> Iterator[int]:
        """Sends to a rank, and yields how many bytes went each time."""
        for message in _ordered(messages):
            words = [self._sent[rank], message.expert, message.num_bytes, message.form]
            head = torch.tensor(words, device=self._device)
            self._copies.follow()
            self._heads.append(head)
            for part in (head.view(torch.uint8), *message.parts):
                data, done = self._copies.view(part), 0
                while done < len(data):
                    moved = self._stage.put(rank, data[done : done + PIECE_BYTES])
                    done += moved
                    yield moved
            self._sent[rank] += 1

    def _receive(self, rank: int, messages: Sequence[Message]) -> Iterator[int]:
        """Receives from a rank, and yields how many bytes came each time."""
        for message in _ordered(messages):
            head = torch.empty(HEAD_WORDS, dtype=torch.int64, device=self._device)
            yield from self._fill(rank, head.view(torch.uint8))
            self._copies.wait()
            found = head.tolist()
            wanted = [self._got[rank], message.expert, message.num_bytes, message.form]
            if found != wanted:
                also = "" if found[:3] != wanted[:3] else ", in other shapes, dtypes or orders in memory"
                raise ConfigMismatchError(
                    f"rank {rank} sends expert {found[1]} with {found[2]} bytes (message {found[0]}) where "
                    f"rank {self._rank} expects expert {wanted[1]} with {wanted[2]} (message {wanted[0]})"
                    f"{also}; {NO_ID} is an expert without a number. Name the same on both sides."
                )
            for part in message.parts:
                yield from self._fill(rank, part)
            self._got[rank] += 1

    def _fill(self, rank: int, data: Bytes) -> Iterator[int]:
        view, done = self._copies.view(data), 0
        while done < len(view):
            moved = self._stage.get(rank, view[done : done + PIECE_BYTES])
            done += moved
            yield moved


def _form_of(tensors: Sequence[torch.Tensor]) -> int:
    text = str([(tuple(each.shape), str(each.dtype), order_of(each)) for each in tensors])
    return digest_of(text.encode())


def _check_targets(going: dict[int, list[Message]], coming: dict[int, list[Message]]) -> None:
    """Checks that what is received is written over nothing else of a move.

    Raises:
        ArgumentError: it is.
    """

    def named(kind: str, queues: dict[int, list[Message]]) -> list[tuple[str, Bytes]]:
        return [
            (f"a tensor of expert {message.expert} that is {kind} rank {rank}", part)
            for rank, messages in queues.items()
            for message in messages
            for part in message.parts
        ]

    received = named("received from", coming)
    check_apart(received)
    # The same tensor may go to many ranks: it counts once.
    sent = {(part.data_ptr(), len(part)): (name, part) for name, part in named("sent to", going)}
    for name, part in sent.values():
        for other, target in received:
            begin, end = target.data_ptr(), target.data_ptr() + len(target)
            if part.data_ptr() < end and begin < part.data_ptr() + len(part):
                rule = f"it shares memory with {name}"
                raise ArgumentError(
                    other, "part of the same memory", rule, "Receive elsewhere, and copy then."
                )


def _check_own(going: list[Message], coming: list[Message]) -> None:
    """Checks what a rank sends to itself.

    Raises:
        ArgumentError: it does not receive that.
    """
    sent, wanted = (
        [(each.expert, each.num_bytes, each.form) for each in _ordered(messages)]
        for messages in (going, coming)
    )
    if sent != wanted:
        names = [[expert for expert, _, _ in kind] for kind in (sent, wanted)]
        rule = f"this rank sends itself experts {names[0]} and receives {names[1]} from itself"
        raise ArgumentError("dst_rank", "this rank", rule, "Name the same tensors' shapes on both sides.")


def _ordered(messages: Sequence[Message]) -> list[Message]:
    """As both sides have them: by expert, and of one expert as they were named."""
    return sorted(messages, key=lambda message: message.expert)
