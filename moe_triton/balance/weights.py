"""`ExpertWeights`: the weights of a rank's slots, in memory that the other ranks of its buffer read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch

from moe_triton.balance.arguments import check_at_least
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import CPU, check_choice, check_text, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

Side = Literal["layer", "double"]
SIDES: tuple[Side, ...] = get_args(Side)
ALIGNMENT = 64  # of tensors: a line of a cache
HEADER_BYTES = 4096  # of each rank, for what a `Mover` says

Spec = tuple[Sequence[int], torch.dtype]
"""Shape of an expert's tensor, without its slot, and its dtype."""


class Memory(Protocol):
    """Memory of each rank that all ranks reach: `moe_triton.EPBuffer.peer_memory`."""

    def of(self, rank: int) -> torch.Tensor:
        """A rank's, (bytes,) uint8."""

    def close(self) -> None:
        """Gives it back."""


class Parts:
    """Where everything lies in a rank's memory: header, and halves of layers of tensors of slots.

    Args:
        num_layers: of experts.
        num_slots: of each rank with routed experts.
        specs: an expert's tensors by name.
        halves: one, or two of which one holds what is next.
    """

    def __init__(self, num_layers: int, num_slots: int, specs: Mapping[str, Spec], halves: int) -> None:
        self.num_layers, self.num_slots, self.specs, self.halves = num_layers, num_slots, dict(specs), halves
        self.expert_bytes = 0
        self._offsets: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in self.specs.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            self.expert_bytes += num_bytes
            self._offsets[name] = end
            end += -(-num_slots * num_bytes // ALIGNMENT) * ALIGNMENT
        self._layer_bytes = end
        self.num_bytes = HEADER_BYTES + halves * num_layers * end

    def tensors(self, memory: torch.Tensor, half: int, layer: int) -> dict[str, torch.Tensor]:
        """A layer's tensors in a rank's memory, (slots, *shape) by name."""
        start = HEADER_BYTES + (half * self.num_layers + layer) * self._layer_bytes
        found = {}
        for name, (shape, dtype) in self.specs.items():
            size = self.num_slots * math.prod(shape) * dtype.itemsize
            flat = memory[start + self._offsets[name] :][:size]
            found[name] = flat.view(dtype).view(self.num_slots, *shape)
        return found


class ExpertWeights:
    """Weights of a rank's slots, layer by layer. Made by `allocate`.

    Args:
        parts: where they lie.
        memory: of all ranks.
        rank: this one.
        server: ranks that are nearest to it, itself among them.

    Attributes:
        halves: of each layer, which half is in use: 0 unless there are two.
    """

    def __init__(self, parts: Parts, memory: Memory, rank: int, server: Sequence[int]) -> None:
        self.parts, self.memory, self.rank, self.server = parts, memory, rank, server
        self.halves = [0] * parts.num_layers

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """A layer's tensors by name, (slots of this rank, *shape): filled once, and read by its experts.

        With ``side="double"`` they are other ones after each switch: ask anew in each step.
        """
        return self.parts.tensors(self.memory.of(self.rank), self.halves[layer], layer)

    def close(self) -> None:
        """Gives the memory back; tensors of it keep it until they go."""
        self.memory.close()


def allocate(
    buffer: EPBuffer, num_layers: int, specs: Mapping[str, Spec], *, side: Side = "layer"
) -> ExpertWeights:
    """Memory for the weights of all slots. Collective: every rank calls it alike.

    Args:
        buffer: whose ranks they are of.
        num_layers: of experts.
        specs: shape and dtype of an expert's tensors by name, the same on every rank.
        side: "layer": moved weights wait in memory of one layer; "double": there is room for all twice.

    Raises:
        ArgumentError: a bad argument.
        ConfigMismatchError: ranks disagree.
        WindowError: no memory for it.
        CommunicationTimeoutError: a rank did not come.
    """
    if not isinstance(buffer, EPBuffer):
        rule = "its ranks hold the weights"
        raise ArgumentError("buffer", shown(buffer), rule, "Pass an EPBuffer.", code=INVALID_ARGUMENT)
    if buffer.device != CPU:
        rule = "weights are moved on the CPU back end so far"
        raise ArgumentError("buffer", f"on {buffer.device}", rule, "Load a layer's weights by its placement.")
    made: list[Parts] = []

    def asked() -> tuple[int, dict[str, Any]]:
        layers, halves = check_at_least("num_layers", num_layers, 1), check_choice("side", side, SIDES)
        checked = _checked(specs)
        made.append(Parts(layers, buffer.config.num_local_experts, checked, 1 + SIDES.index(halves)))
        described = {name: [list(shape), str(dtype)] for name, (shape, dtype) in checked.items()}
        return made[0].num_bytes, {"num_layers": layers, "side": side, "specs": described}

    memory = buffer.peer_memory(asked)
    return ExpertWeights(made[0], memory, buffer.rank, buffer.config.topology.neighbours(buffer.rank))


def _checked(specs: object) -> dict[str, Spec]:
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
        checked[check_text("specs", name)] = sizes, dtype
    return checked
