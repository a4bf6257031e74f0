"""Redundant experts in training: weights come to a rank's slots before experts run, gradients go back after.

A rank has slots for experts of other ranks of its server, and each step may fill them anew. What DeepEP's
`EPBuffer` does by `lb_prefetch_weights` and `lb_reduce_grads`, the slots' memory does here.

Each call has two waits for all ranks (`EPBuffer.barrier`: flags in memory that ranks map), and all that ranks
do to each other's memory is between them:

1. Who is behind the first wait knows that all ranks have entered the call. Their slots are no longer in use
   (weights) or are full (gradients), and the tensors of their own experts are ready.
2. Now the owner of an expert copies its weights to each slot that has it, or adds the gradients of these
   slots to its own. Nobody else writes there: a slot has one expert at most, and an expert has one owner.
3. Who is behind the second wait knows that all ranks are done: its slots are full (weights) or no longer read
   (gradients). With the tensors of its own experts only the rank itself has had to do, before that wait.

So callers may do what they like with any of the tensors once their call has returned, and the next call needs
to know nothing of this one.

Shapes: W ranks of this rank's server, S slots of each rank, L experts of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moe_triton.balance.arguments import check_at_least, check_even
from moe_triton.balance.stage import Memory, digest_of
from moe_triton.balance.weights import HEADER_BYTES, Parts, Spec, check_specs, described_specs
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import CPU, check_choice, check_integer, check_tensor, contiguous, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError, BufferStateError, ConfigMismatchError
from moe_triton.core.topology import Topology

REMEDY = "Close them, and allocate new ones on every rank."
EMPTY = -1  # in the mapping: a slot without an expert
CALLS = PREFETCH, REDUCE = "lb_prefetch_weights", "lb_reduce_grads"

# What a rank says of the call that it is in: 64-bit words at the beginning of its memory. All but ENDED are
# written before the first wait of a call and read before its second one; ENDED is written before the second
# wait, and read behind it. So nobody writes a word that others may still read.
NUMBER, CALL, LOCAL, MAPPING, TENSORS, ENDED = range(6)
NUM_WORDS = 6
COMPARED = {
    CALL: "their calls",
    LOCAL: "the number of their own experts",
    MAPPING: "redundancy_mapping",
    TENSORS: "the places and sizes of redundant tensors",
}


class Pair(NamedTuple):
    """Tensors that belong together.

    Attributes:
        offset: of the slots, in bytes of each rank's memory.
        expert_bytes: of an expert.
        own: (L, ...) of this rank's experts.
    """

    offset: int
    expert_bytes: int
    own: torch.Tensor

    def slot(self, memory: torch.Tensor, slot: int) -> torch.Tensor:
        """A slot in a rank's memory, (expert_bytes,) uint8."""
        start = self.offset + slot * self.expert_bytes
        return memory[start : start + self.expert_bytes]


class Replica(NamedTuple):
    """A slot that has one of this rank's experts.

    Attributes:
        rank, slot: whose slot, and its number.
        expert: the expert's number on this rank.
    """

    rank: int
    slot: int
    expert: int


class RedundantExperts:
    """Slots for experts of other ranks: their tensors on this rank. Made by `allocate_redundant_experts`.

    All ranks of the buffer make the same calls in the same order. A mapping is of one server, and the same on
    all its ranks: row r has the slots of its rank r, counted from 0, whose expert e has the id ``r * L + e``.
    Servers may have different ones.

    Args:
        parts: where tensors lie in a rank's memory.
        memory: of all ranks.
        barrier: waits until all ranks are there, and raises for one that does not come.
        rank: this one.
        topology: which ranks share a server.
        device: of all tensors.
    """

    def __init__(
        self,
        parts: Parts,
        memory: Memory,
        barrier: Callable[[], None],
        rank: int,
        topology: Topology,
        device: torch.device,
    ) -> None:
        self._parts, self._memory, self._barrier, self._device = parts, memory, barrier, device
        self._rank, self._topology = rank, topology
        self._server = topology.neighbours(rank)
        self._number = 0
        self._left = ""  # why no call can be made any more
        self._inside = threading.Lock()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The slots' tensors by name, (S, *shape) each: zeros at first.

        Raises:
            BufferStateError: the memory was given back.
        """
        return self._parts.tensors(self._memory.of(self._rank), 0, 0)

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Sequence[torch.Tensor] | torch.Tensor,
        expert_weights: Sequence[torch.Tensor] | torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: None = None,
    ) -> None:
        """Copies experts' weights to the slots that the mapping has for them. Collective.

        All is there when it returns. Slots without an expert stay as they are.

        Args:
            redundant_expert_weights: (S, ...), any of `tensors`, or the first slots of one; several are
                copied together.
            expert_weights: (L, ...), one for each of those, of this rank's own experts, in any memory. An
                expert has as many bytes in both; dtype and shape may differ.
            redundancy_mapping: (W, S) int32 or int64, the expert of each slot of each rank, -1 for none; none
                of the rank's own. An expert may be in several slots of a rank.
            num_sms: 0. Copies run on the calling thread.
            previous_event: None. Tensors are read as they are when the call begins.

        Raises:
            ArgumentError: a bad argument. Nothing was sent.
            BufferStateError: the buffer or this memory is closed or broken, or a call of another thread is
                under way.
            ConfigMismatchError: ranks differ in what they pass, or in the call that they make.
            CommunicationTimeoutError: a rank did not come. The buffer is then broken.
        """
        _check_options(num_sms, previous_event)
        names = "redundant_expert_weights", "expert_weights"
        pairs, num_slots = self._pairs(names, redundant_expert_weights, expert_weights)
        replicas, words = self._replicas(redundancy_mapping, pairs, num_slots)

        def copy() -> None:
            copies = self._memory.copies
            for pair in pairs:
                own = pair.own.reshape(len(pair.own), -1).view(torch.uint8)
                for replica in replicas:
                    slot = pair.slot(self._memory.of(replica.rank), replica.slot)
                    copies.copy_in_turn(copies.view(slot), copies.view(own[replica.expert]))

        self._together(PREFETCH, words, copy)

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Sequence[torch.Tensor] | torch.Tensor,
        expert_grads: Sequence[torch.Tensor] | torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: None = None,
    ) -> None:
        """Adds the gradients in slots to those of the experts' owners. Collective.

        An owner adds to what it has in the order of ranks, and of each rank in that of slots, whatever comes
        first; so the same inputs give the same bits. Slots stay as they are, those without an expert unread.

        Args:
            redundant_expert_grads: (S, ...) fp32, any of `tensors`, or the first slots of one; or several.
            expert_grads: (L, ...) fp32, one for each of those, of this rank's own experts, in any memory.
                They are added to.
            redundancy_mapping: see `lb_prefetch_weights`.
            num_sms: see `lb_prefetch_weights`.
            previous_event: see `lb_prefetch_weights`.

        Raises:
            ArgumentError: a bad argument. Nothing was sent.
            BufferStateError: the buffer or this memory is closed or broken, or a call of another thread is
                under way.
            ConfigMismatchError: ranks differ in what they pass, or in the call that they make.
            CommunicationTimeoutError: a rank did not come. The buffer is then broken.
        """
        _check_options(num_sms, previous_event)
        names = "redundant_expert_grads", "expert_grads"
        pairs, num_slots = self._pairs(names, redundant_expert_grads, expert_grads, torch.float32)
        replicas, words = self._replicas(redundancy_mapping, pairs, num_slots)

        def add() -> None:
            for pair in pairs:
                own = pair.own.view(len(pair.own), -1)
                for replica in replicas:
                    slot = pair.slot(self._memory.of(replica.rank), replica.slot)
                    own[replica.expert].add_(slot.view(torch.float32))

        self._together(REDUCE, words, add)

    def close(self) -> None:
        """Gives the memory back; tensors of it keep it until they go."""
        self._memory.close()

    def _pairs(
        self, names: tuple[str, str], slots: object, own: object, dtype: torch.dtype | None = None
    ) -> tuple[list[Pair], int]:
        """The tensors of a call, and S.

        Raises:
            ArgumentError: they are not what they have to be.
        """
        ours, theirs = _listed(names[0], slots), _listed(names[1], own)
        if len(ours) != len(theirs):
            rule = f"{names[0]} has {len(ours)}, and they belong together"
            raise ArgumentError(names[1], f"{len(theirs)} tensor(s)", rule, "Pass as many of both.")
        num_slots: int | str = "slots"
        num_local: int | str = "experts of this rank"
        pairs = []
        for slot, expert in zip(ours, theirs, strict=True):
            redundant = _dense(names[0], slot, num_slots, dtype, self._device)
            tensor = _dense(names[1], expert, num_local, dtype, self._device)
            num_slots, num_local = len(redundant), len(tensor)
            if num_local < 1:
                rule = "each rank has experts of its own"
                raise ArgumentError(names[1], f"of shape {tuple(tensor.shape)}", rule, "Pass theirs.")
            expert_bytes = tensor.nbytes // num_local
            if redundant.nbytes != num_slots * expert_bytes:
                rule = f"an expert has {expert_bytes} bytes in {names[1]}, and {num_slots} have as many each"
                given = f"of shape {tuple(redundant.shape)} and dtype {redundant.dtype}"
                raise ArgumentError(names[0], given, rule, "Pass tensors of the same experts.")
            pairs.append(Pair(self._offset(names[0], redundant), expert_bytes, tensor))
        assert isinstance(num_slots, int)
        self._check_apart(names, pairs, num_slots)
        return pairs, num_slots

    def _check_apart(self, names: tuple[str, str], pairs: Sequence[Pair], num_slots: int) -> None:
        """Checks that none of this rank's own tensors lies in slots of the call.

        Raises:
            ArgumentError: one does.
        """
        base = self._memory.of(self._rank).data_ptr()
        for pair, other in itertools.product(pairs, pairs):
            start = pair.own.data_ptr() - base - other.offset
            if -pair.own.nbytes < start < num_slots * other.expert_bytes:
                rule = f"it must share no memory with {names[0]}, which other ranks use in this call"
                raise ArgumentError(names[1], "a part of that", rule, "Pass a tensor elsewhere.")

    def _offset(self, name: str, tensor: torch.Tensor) -> int:
        """Where a tensor is in this rank's memory, in bytes.

        Raises:
            ArgumentError: elsewhere.
        """
        memory = self._memory.of(self._rank)
        offset = tensor.data_ptr() - memory.data_ptr()
        if not HEADER_BYTES <= offset <= memory.nbytes - tensor.nbytes or not tensor.nbytes:
            rule = "other ranks use it, and it must lie in memory that they reach"
            remedy = "Pass what `tensors` has, or make memory for it with allocate_redundant_experts."
            raise ArgumentError(name, "elsewhere", rule, remedy, code=INVALID_ARGUMENT)
        return offset

    def _replicas(
        self, mapping: object, pairs: Sequence[Pair], num_slots: int
    ) -> tuple[list[Replica], tuple[int, int, int]]:
        """The slots of this rank's experts, by rank and slot; and what ranks compare, from LOCAL on.

        Raises:
            ArgumentError: it is no mapping.
        """
        name, size, num_local = "redundancy_mapping", len(self._server), len(pairs[0].own)
        dtypes = torch.int32, torch.int64
        # The host reads it, so it may be on the host where tensors are not.
        device = CPU if isinstance(mapping, torch.Tensor) and mapping.is_cpu else self._device
        given = contiguous(name, mapping, shape=(size, num_slots), dtypes=dtypes, device=device)
        checked = given.to(CPU, torch.int64)
        replicas, me = [], self._rank - self._server.start
        for row, experts in enumerate(checked.tolist()):
            for slot, expert in enumerate(experts):
                if not EMPTY <= expert < size * num_local:
                    most = size * num_local - 1
                    rule = f"{size} rank(s) with {num_local} expert(s) have 0 to {most}, and -1 is none"
                    remedy = "Pass ids of experts of this server's ranks."
                    raise ArgumentError(name, f"{expert} at [{row}, {slot}]", rule, remedy)
                owner, number = divmod(expert, num_local)
                # As in DeepEP, whose README rules it out: an owner would be its own peer in both calls.
                if expert != EMPTY and owner == row:
                    rule = f"rank {row} has that expert itself"
                    remedy = "Give its slots experts of other ranks, or -1."
                    raise ArgumentError(name, f"{expert} at [{row}, {slot}]", rule, remedy)
                if owner == me:
                    replicas.append(Replica(self._server[row], slot, number))
        places = ",".join(f"{pair.offset}:{pair.expert_bytes}" for pair in pairs)
        return replicas, (
            num_local,
            digest_of(checked.numpy().tobytes()),
            digest_of(f"{num_slots},{places}".encode()),
        )

    def _together(self, call: str, words: tuple[int, int, int], work: Callable[[], None]) -> None:
        """Works between two waits for all ranks, if they are in the same call and pass the same.

        Raises:
            BufferStateError: no call can be made.
            ConfigMismatchError: ranks differ.
        """
        if not self._inside.acquire(blocking=False):
            raise BufferStateError("another thread is inside these redundant experts; calls must not overlap")
        try:
            if self._left:
                raise BufferStateError(f"these redundant experts are broken: {self._left}. {REMEDY}")
            mine = self._words_of(self._rank)
            entered = [self._number + 1, CALLS.index(call), *words]
            mine[:ENDED] = torch.tensor(entered, dtype=torch.int64, device=CPU)
            self._barrier()
            try:
                self._number += 1
                said = self._all_said()
                self._check_numbers(said)
                difference = self._difference(said)
                if not difference:
                    # Tensors may have been made in inference mode or not, and these are no steps of autograd.
                    with torch.inference_mode():
                        work()
            except BaseException as error:  # an interrupt, too: peers are in the second wait, or will be
                self._left = f"{call} ended in {type(error).__name__}"
                raise
            mine[ENDED] = self._number
            # Also where ranks differ: none of them begins another call before all have seen that.
            self._barrier()
            if difference:
                raise ConfigMismatchError(difference)
            self._check_ended(call)
        finally:
            self._inside.release()

    def _check_numbers(self, said: Sequence[Sequence[int]]) -> None:
        """Checks that all ranks have come to the first wait of this very call.

        Raises:
            ConfigMismatchError: some came there from elsewhere, and will not come to the second one.
        """
        if others := [rank for rank, words in enumerate(said) if words[NUMBER] != self._number]:
            raise ConfigMismatchError(
                f"{self._topology.in_words(others)} did not make call number {self._number} of these "
                f"redundant experts, which rank {self._rank} is in: every rank has to make the same calls in "
                f"the same order. {REMEDY}"
            )

    def _difference(self, said: Sequence[Sequence[int]]) -> str:
        """How ranks of a server differ in what they pass; empty if they do not. All ranks find the same."""
        for server in map(self._topology.ranks_on, range(self._topology.num_servers)):
            first = said[server.start]
            for word, name in COMPARED.items():
                others = [rank for rank in server if said[rank][word] != first[word]]
                if others:
                    values = {rank: _value(word, said[rank][word]) for rank in (server.start, *others)}
                    return (
                        f"ranks differ in {name}: rank(s) {others} from rank {server.start}. By rank: "
                        f"{values}. Pass the same on every rank of a server."
                    )
        return ""

    def _check_ended(self, call: str) -> None:
        """Checks that all ranks have come to the second wait because they are done.

        One that is interrupted in a call comes there with its next one, of whatever memory.

        Raises:
            ConfigMismatchError: some are not done.
        """
        if others := [rank for rank, words in enumerate(self._all_said()) if words[ENDED] != self._number]:
            self._left = f"a {call} was left before its end"
            raise ConfigMismatchError(
                f"{self._topology.in_words(others)} left {call} number {self._number} before its end: what "
                f"it copies or adds is not complete. {REMEDY}"
            )

    def _words_of(self, rank: int) -> torch.Tensor:
        return self._memory.of(rank)[: 8 * NUM_WORDS].view(torch.int64)

    def _all_said(self) -> list[list[int]]:
        """The words of all ranks."""
        return [self._words_of(rank).tolist() for rank in range(len(self._topology.servers))]


def allocate_redundant_experts(
    buffer: EPBuffer, num_redundant_experts: int, specs: Mapping[str, Spec]
) -> RedundantExperts:
    """Memory for redundant experts: slots of each rank, in reach of all. Collective: all ranks call it alike.

    Args:
        buffer: whose ranks they are of. Its calls and those of redundant experts come in the same order on
            every rank.
        num_redundant_experts: S, slots of each rank.
        specs: shape and dtype of an expert's tensors by name, without the slot: weights, their scales, and
            fp32 for gradients. The same on every rank.

    Raises:
        ArgumentError: a bad argument.
        ConfigMismatchError: ranks disagree.
        WindowError: no memory for it.
        CommunicationTimeoutError: a rank did not come.
    """
    if not isinstance(buffer, EPBuffer):
        rule = "its ranks hold the experts"
        raise ArgumentError("buffer", shown(buffer), rule, "Pass an EPBuffer.", code=INVALID_ARGUMENT)
    check_even(buffer.config)
    if buffer.config.num_shared_ranks:
        rule = "ids count the experts of all ranks alike, and those of shared experts have no others"
        given = f"with {buffer.config.num_shared_ranks} rank(s) of shared experts"
        raise ArgumentError("buffer", given, rule, "Construct it with num_shared_ranks=0.")
    made: list[Parts] = []

    def asked() -> tuple[int, dict[str, Any]]:
        slots = check_at_least("num_redundant_experts", num_redundant_experts, 1)
        checked = check_specs(specs)
        made.append(Parts(1, slots, checked, 1))
        return made[0].num_bytes, {"num_redundant_experts": slots, "specs": described_specs(checked)}

    memory = buffer.peer_memory(asked)
    topology, device = buffer.config.topology, buffer.device
    return RedundantExperts(made[0], memory, buffer.barrier, buffer.rank, topology, device)


def _check_options(num_sms: object, previous_event: object) -> None:
    """Checks options of DeepEP's that have one value here.

    Raises:
        ArgumentError: they have another.
    """
    check_choice("num_sms", check_integer("num_sms", num_sms), (0,), "Pass 0: the calling thread copies.")
    remedy = "Pass None: tensors are read as they are when the call begins."
    check_choice("previous_event", previous_event, (None,), remedy)


def _listed(name: str, value: object) -> list[object]:
    """One tensor, or several, as a list.

    Raises:
        ArgumentError: neither, or none.
    """
    if isinstance(value, (list, tuple)) and value:
        return list(value)
    if isinstance(value, torch.Tensor):
        return [value]
    rule = "it must be a tensor, or a list or tuple of some"
    raise ArgumentError(name, shown(value), rule, "Pass a tensor.", code=INVALID_ARGUMENT)


def _dense(
    name: str, value: object, first: int | str, dtype: torch.dtype | None, device: torch.device
) -> torch.Tensor:
    """A tensor that lies in one piece, of a size in its first dimension, apart from autograd.

    Raises:
        ArgumentError: it is something else.
    """
    tensor: Any = value.detach() if isinstance(value, torch.Tensor) else value
    is_tensor = isinstance(tensor, torch.Tensor)
    rest = ["any"] * (max(tensor.ndim, 1) - 1 if is_tensor else 0)
    dtypes = [dtype or tensor.dtype] if is_tensor else []
    return check_tensor(name, tensor, shape=(first, *rest), dtypes=dtypes, device=device)


def _value(word: int, value: int) -> int | str:
    """A word as messages show it."""
    if word == CALL:
        return CALLS[value]
    return value if word == LOCAL else f"{value:014x}"
