"""`ExpertWeights`: the weights of a rank's slots, in memory that the other ranks of its buffer read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch

from moe_triton.balance.agreement import Agreement, AtCheckpoints, InMemory
from moe_triton.balance.arguments import check_at_least, check_even, check_layer
from moe_triton.balance.carriers import Region, make_stage
from moe_triton.balance.stage import LINE, Bytes, Memory, Stage
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import check_choice, check_text, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError, BufferStateError
from moe_triton.core.topology import Topology

Side = Literal["layer", "double"]
SIDES: tuple[Side, ...] = get_args(Side)
ALIGNMENT = 64  # of tensors: a line of a cache
HEADER_BYTES = 4096  # of each rank, for what it says of moves
QUANTIZED = torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4
CHECKPOINT_STEPS = 16
"""Reading what all ranks say takes a store about 0.1 ms a rank."""
STAGE_BYTES = 8 << 20
"""Of each rank: a few pieces of a megabyte for each of some ranks."""

Spec = tuple[Sequence[int], torch.dtype]
"""Shape of an expert's tensor, without its slot, and its dtype."""


def num_bytes_of(spec: Spec) -> int:
    """Bytes of an expert's tensor."""
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


class Parts:
    """What an expert consists of, and where all of them lie in a rank's memory.

    That is: header, and halves of layers of tensors of slots.

    Args:
        num_layers: of experts.
        num_slots: of each rank with routed experts.
        specs: an expert's tensors by name.
        halves: one, or two of which one holds what is next.
    """

    def __init__(self, num_layers: int, num_slots: int, specs: Mapping[str, Spec], halves: int) -> None:
        self.num_layers, self.num_slots, self.specs, self.halves = num_layers, num_slots, dict(specs), halves
        self.sizes = {name: num_bytes_of(spec) for name, spec in self.specs.items()}
        self.expert_bytes = sum(self.sizes.values())
        self._offsets: dict[str, int] = {}
        end = 0
        for name, num_bytes in self.sizes.items():
            self._offsets[name] = end
            end += -(-num_slots * num_bytes // ALIGNMENT) * ALIGNMENT
        self._layer_bytes = end
        self.num_bytes = HEADER_BYTES + halves * num_layers * end

    def tensors(self, memory: torch.Tensor, half: int, layer: int) -> dict[str, torch.Tensor]:
        """A layer's tensors in a rank's memory, (slots, *shape) by name."""
        found = {}
        for name, (shape, dtype) in self.specs.items():
            start = self._start(half, layer, name)
            flat = memory[start : start + self.num_slots * self.sizes[name]]
            found[name] = flat.view(dtype).view(self.num_slots, *shape)
        return found

    def bytes_of(self, memory: torch.Tensor, half: int, layer: int, name: str, slot: int) -> Bytes:
        """Those of one tensor of an expert."""
        size = self.sizes[name]
        start = self._start(half, layer, name) + slot * size
        return memory[start : start + size]

    def _start(self, half: int, layer: int, name: str) -> int:
        return HEADER_BYTES + (half * self.num_layers + layer) * self._layer_bytes + self._offsets[name]


class Holder(Protocol):
    """Who moves weights: a `moe_triton.balance.Mover`."""

    @property
    def is_moving(self) -> bool:
        """Whether a move has begun and not ended."""

    def check_usable(self) -> None:
        """Raises BufferStateError if it has failed."""

    def retire(self) -> None:
        """Moves nothing any more: another one does."""


class ExpertWeights:
    """Weights of a rank's slots, layer by layer. Made by `allocate`.

    Args:
        parts: where they lie.
        memory: of all ranks.
        rank: this one.
        topology: of the ranks.
        num_shared_ranks: that have shared experts alone.
        agreement: of the ranks, on when to change.
        stage: to ranks that cannot read them in place.

    Attributes:
        halves: of each layer, which half is in use: 0 unless there are two.
        stage: through which they go where other ranks cannot read them in place; None without such ranks.
    """

    def __init__(
        self,
        parts: Parts,
        memory: Memory,
        rank: int,
        topology: Topology,
        num_shared_ranks: int,
        agreement: Agreement,
        stage: Stage | None = None,
    ) -> None:
        self.stage = stage
        self.parts, self.memory, self.rank, self.topology = parts, memory, rank, topology
        self.num_ranks, self.num_shared_ranks = len(topology.servers), num_shared_ranks
        self.agreement = agreement
        self._mover: Holder | None = None
        self.halves = [0] * parts.num_layers

    def layer(self, layer: int) -> Mapping[str, Any]:
        """A layer's tensors by name, (slots of this rank, *shape): filled once, and read by its experts.

        With ``side="double"`` they are other ones after each switch: ask anew in each step.

        Raises:
            ArgumentError: there is no such layer.
            BufferStateError: the memory was given back.
        """
        number = check_layer(layer, self.parts.num_layers)
        return self.parts.tensors(self.memory.of(self.rank), self.halves[number], number)

    def bytes_of(self, rank: int, half: int, layer: int, name: str, slot: int) -> Bytes:
        """Those of one tensor of an expert, where it lies.

        Args:
            rank: that holds it: this one, or one whose weights are not staged.
            half, layer, name, slot: which tensor.

        Raises:
            BufferStateError: the memory was given back.
        """
        return self.parts.bytes_of(self.memory.of(rank), half, layer, name, slot)

    def is_staged(self, rank: int) -> bool:
        """Whether weights come from a rank, or go to it, through the stage."""
        return rank in self.memory.queued

    def neighbours(self, rank: int) -> range:
        """Ranks of a rank's server, itself among them: they are nearest to it."""
        return self.topology.neighbours(rank)

    def check_unchanged(self) -> None:
        """Checks that tensors are where they were: those of `allocate` always are."""

    def hand_to(self, mover: Holder) -> None:
        """Gives them to a mover, and takes them from the one before.

        Raises:
            BufferStateError: that one moves them, or has failed.
        """
        if (before := self._mover) is not None:
            before.check_usable()
            if before.is_moving:
                raise BufferStateError("another Mover is moving these weights. Use that one.")
            before.retire()
        self._mover = mover
        self.agreement.enter(self.memory.copies.mark_in_turn())

    def close(self) -> None:
        """Gives the memory back; tensors of it keep it until they go. Ranks that still move hear of it."""
        with contextlib.suppress(BufferStateError, RuntimeError):  # closed before; or no store any more
            self.agreement.give_up()
        self.memory.close()


def allocate(
    buffer: EPBuffer,
    num_layers: int,
    specs: Mapping[str, Spec],
    *,
    side: Side = "layer",
    stage_bytes: int = STAGE_BYTES,
    checkpoint_steps: int = CHECKPOINT_STEPS,
) -> ExpertWeights:
    """Memory for the weights of all slots. Collective: every rank calls it alike.

    Ranks of a server read them in place. To ranks of other servers they go through a stage, by queues.

    Args:
        buffer: whose ranks they are of.
        num_layers: of experts.
        specs: shape and dtype of an expert's tensors by name, the same on every rank.
        side: "layer": moved weights wait in memory of one layer; "double": there is room for all twice.
        stage_bytes: of the memory through which they go to ranks of other servers; without such ranks there
            is none.
        checkpoint_steps: on an NPU, and where there are several servers, steps from one to the next in which
            ranks hear of each other's moves, and may change. Else they hear in every step.

    Raises:
        ArgumentError: a bad argument.
        ConfigMismatchError: ranks disagree.
        WindowError: no memory for it; or on an A2 there are several servers.
        CommunicationTimeoutError: a rank did not come.
    """
    check_buffer(buffer)
    config, made = buffer.config, Made()

    def asked() -> tuple[int, dict[str, Any]]:
        layers, halves = check_at_least("num_layers", num_layers, 1), num_halves(side)
        made.every = check_at_least("checkpoint_steps", checkpoint_steps, 1)
        ring_bytes = ring_bytes_of(stage_bytes, config.num_ranks)
        made.ring_bytes = ring_bytes if config.topology.num_servers > 1 else 0
        made.parts = parts = Parts(layers, config.num_local_experts, check_specs(specs), halves)
        made.staged_from = parts.num_bytes
        said = {**described(parts, side), **made.said(), "ring_bytes": ring_bytes}
        return made.num_bytes(config.num_ranks), said

    memory = buffer.peer_memory(asked, lambda: made.out_bytes(config.num_ranks))
    agreement, stage = made.agreement(buffer, memory), None
    if memory.queued:
        stage = made.stage(buffer, memory)
    shared = config.num_shared_ranks
    return ExpertWeights(made.parts, memory, buffer.rank, config.topology, shared, agreement, stage)


class Made:
    """What a request for memory has found out, behind weights or without them.

    Attributes:
        parts: of an expert.
        every: steps from checkpoint to checkpoint.
        ring_bytes: of the stage; 0: there is none.
        staged_from: where that begins.
    """

    parts: Parts
    every: int
    ring_bytes: int = 0
    staged_from: int = HEADER_BYTES

    def num_bytes(self, num_ranks: int) -> int:
        """Of a rank's memory."""
        return self.staged_from + (Region.num_bytes(num_ranks, self.ring_bytes) if self.ring_bytes else 0)

    def out_bytes(self, num_ranks: int) -> int:
        """Of that from which a rank posts."""
        return Region.out_bytes(num_ranks, self.ring_bytes)

    def said(self) -> dict[str, int]:
        """What ranks must say alike."""
        return {"ring_bytes": self.ring_bytes, "checkpoint_steps": self.every}

    def agreement(self, buffer: EPBuffer, memory: Memory) -> Agreement:
        """How ranks agree."""
        rank, num_ranks = buffer.rank, buffer.config.num_ranks
        if not memory.copies.is_asynchronous and buffer.config.topology.num_servers == 1:
            return InMemory(memory, rank, num_ranks)
        name = f"moves/{memory.number}"
        return AtCheckpoints(memory, buffer, name, rank, num_ranks, self.every, memory.timeout_s)

    def stage(self, buffer: EPBuffer, memory: Memory) -> Stage:
        """Between ranks that do not read each other's weights."""
        region = Region(memory, self.staged_from, buffer.rank, buffer.config.num_ranks, self.ring_bytes)
        return make_stage(region, buffer, f"stage/{memory.number}", self.every)


def ring_bytes_of(stage_bytes: object, num_ranks: int) -> int:
    """Bytes that a rank's stage has for each other one.

    Raises:
        ArgumentError: there would be none.
    """
    wanted = check_at_least("stage_bytes", stage_bytes, 1)
    ring_bytes = wanted // num_ranks // LINE * LINE
    if not ring_bytes:
        rule = f"each of {num_ranks} ranks gets a part of at least {LINE} bytes"
        raise ArgumentError("stage_bytes", wanted, rule, f"Pass {LINE * num_ranks} or more.")
    return ring_bytes


def check_buffer(buffer: object) -> None:
    """Checks that it is one, with as many experts on all ranks that have routed ones.

    Raises:
        ArgumentError: it is none, or ranks have different numbers of them.
    """
    if not isinstance(buffer, EPBuffer):
        rule = "its ranks hold the weights"
        raise ArgumentError("buffer", shown(buffer), rule, "Pass an EPBuffer.", code=INVALID_ARGUMENT)
    check_even(buffer.config)


def num_halves(side: object) -> int:
    """Of which weights consist.

    Raises:
        ArgumentError: there is no such side.
    """
    return 1 + SIDES.index(check_choice("side", side, SIDES))


def described(parts: Parts, side: Side) -> dict[str, Any]:
    """What all ranks must say alike of weights, JSON's types by name."""
    return {"num_layers": parts.num_layers, "side": side, "specs": described_specs(parts.specs)}


def described_specs(specs: Mapping[str, Spec]) -> dict[str, list[Any]]:
    """Shapes and dtypes in JSON's types."""
    return {name: [list(shape), str(dtype)] for name, (shape, dtype) in specs.items()}


def has_whole_bytes(dtype: torch.dtype) -> bool:
    """Whether bytes are all that tensors of a dtype hold, and elements are whole ones."""
    if dtype in QUANTIZED:  # their scales are elsewhere
        return False
    try:
        return torch.empty(1, dtype=dtype).view(torch.uint8).numel() > 0
    except RuntimeError:
        return False


def check_specs(specs: object) -> dict[str, Spec]:
    """What describes an expert's tensors.

    Raises:
        ArgumentError: something else.
    """
    checked: dict[str, Spec] = {}
    if not isinstance(specs, Mapping) or not specs:
        rule = "it has an expert's tensors by name"
        raise ArgumentError("specs", shown(specs), rule, 'Pass {"w13": ((2 * i, h), torch.bfloat16), ...}.')
    for name, spec in specs.items():
        try:
            shape, dtype = spec
            sizes = tuple(check_at_least("specs", each, 1) for each in shape)
        except (TypeError, ValueError):
            sizes, dtype = (), None
        if not isinstance(dtype, torch.dtype):
            rule = "a tensor is described by its shape, without the slot, and its dtype"
            raise ArgumentError("specs", shown(spec), rule, "Pass ((rows, columns), torch.bfloat16).")
        if not has_whole_bytes(dtype):
            rule = "elements are whole bytes that hold all that there is"
            raise ArgumentError("specs", f"{dtype}", rule, "Describe it as torch.uint8.")
        checked[check_text("specs", name)] = sizes, dtype
    return checked
