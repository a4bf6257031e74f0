"""`ExpertWeights`: the weights of a rank's slots, in memory that the other ranks of its buffer read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch

from moe_triton.balance.agreement import Agreement, AtCheckpoints, InMemory
from moe_triton.balance.arguments import check_at_least, check_layer
from moe_triton.balance.stage import Bytes, Memory, Stage
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import CPU, check_choice, check_text, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError, BufferStateError
from moe_triton.core.topology import Topology

Side = Literal["layer", "double"]
SIDES: tuple[Side, ...] = get_args(Side)
ALIGNMENT = 64  # of tensors: a line of a cache
HEADER_BYTES = 4096  # of each rank, for what it says of moves
QUANTIZED = torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4
CHECKPOINT_STEPS = 16
"""Reading what all ranks say takes a store about 0.1 ms a rank."""

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

    Attributes:
        halves: of each layer, which half is in use: 0 unless there are two.
        stage: through which they go where other ranks cannot read them in place.
    """

    stage: Stage | None = None

    def __init__(
        self,
        parts: Parts,
        memory: Memory,
        rank: int,
        topology: Topology,
        num_shared_ranks: int,
        agreement: Agreement,
    ) -> None:
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
            rank: that holds it: without a stage any, else this one.
            half, layer, name, slot: which tensor.

        Raises:
            BufferStateError: the memory was given back.
        """
        return self.parts.bytes_of(self.memory.of(rank), half, layer, name, slot)

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
    checkpoint_steps: int = CHECKPOINT_STEPS,
) -> ExpertWeights:
    """Memory for the weights of all slots. Collective: every rank calls it alike.

    Args:
        buffer: whose ranks they are of.
        num_layers: of experts.
        specs: shape and dtype of an expert's tensors by name, the same on every rank.
        side: "layer": moved weights wait in memory of one layer; "double": there is room for all twice.
        checkpoint_steps: on an NPU, steps from one to the next in which ranks hear of each other's moves, and
            may change. On a CPU they hear in every step.

    Raises:
        ArgumentError: a bad argument.
        ConfigMismatchError: ranks disagree.
        WindowError: no memory for it.
        CommunicationTimeoutError: a rank did not come.
    """
    check_buffer(buffer)
    made: list[Parts] = []

    def asked() -> tuple[int, dict[str, Any]]:
        layers, halves = check_at_least("num_layers", num_layers, 1), num_halves(side)
        every.append(check_at_least("checkpoint_steps", checkpoint_steps, 1))
        made.append(Parts(layers, buffer.config.num_local_experts, check_specs(specs), halves))
        return made[0].num_bytes, {**described(made[0], side), "checkpoint_steps": every[0]}

    every: list[int] = []
    memory = buffer.peer_memory(asked)
    rank, num_ranks = buffer.rank, buffer.config.num_ranks
    agreement: Agreement = InMemory(memory, rank, num_ranks)
    if memory.copies.is_asynchronous:
        name = f"moves/{memory.number}"
        agreement = AtCheckpoints(memory, buffer, name, rank, num_ranks, every[0], memory.timeout_s)
    config = buffer.config
    return ExpertWeights(made[0], memory, rank, config.topology, config.num_shared_ranks, agreement)


def check_buffer(buffer: object) -> None:
    """Checks that it is one.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(buffer, EPBuffer):
        rule = "its ranks hold the weights"
        raise ArgumentError("buffer", shown(buffer), rule, "Pass an EPBuffer.", code=INVALID_ARGUMENT)


def check_synchronous(buffer: EPBuffer) -> None:
    """Checks that what a rank's host has done its device has.

    Raises:
        ArgumentError: it is of a back end whose hosts run ahead.
    """
    if buffer.device != CPU:
        rule = "this moves weights on the CPU back end so far"
        remedy = "Make them by moe_triton.balance.allocate, which a Mover takes on an NPU too."
        raise ArgumentError("buffer", f"on {buffer.device}", rule, remedy)


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
