"""`adopt`: weights that a model holds in memory of its own are moved through a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from moe_triton.balance.agreement import Agreement, InMemory
from moe_triton.balance.arguments import check_at_least, check_layer
from moe_triton.balance.stage import LINE, Bytes, Memory, Stage
from moe_triton.balance.weights import (
    HEADER_BYTES,
    ExpertWeights,
    Parts,
    Side,
    Spec,
    check_buffer,
    check_synchronous,
    described,
    has_whole_bytes,
    num_halves,
)
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import CPU, check_text, not_plain_error, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.topology import Topology

STAGE_BYTES = 8 << 20
"""Of each rank: a few pieces of a megabyte for each of some ranks."""

Held = torch.Tensor | Sequence[torch.Tensor]
"""Of a layer's slots: a tensor (slots, *shape), or one for each."""


class AdoptedWeights(ExpertWeights):
    """Weights that a model made itself. Made by `adopt`.

    Args:
        parts: what an expert consists of.
        memory: of all ranks, for what a `Mover` says and the stage.
        rank: this one.
        topology: of the ranks.
        num_shared_ranks: that have shared experts alone.
        layers: the model's own.
        stage: to the other ranks.
        agreement: of the ranks, on when to change.
    """

    def __init__(
        self,
        parts: Parts,
        memory: Memory,
        rank: int,
        topology: Topology,
        num_shared_ranks: int,
        layers: Sequence[Mapping[str, Held]],
        stage: Stage,
        agreement: Agreement,
    ) -> None:
        super().__init__(parts, memory, rank, topology, num_shared_ranks, agreement)
        self.stage = stage
        # What is moved is the tensors' memory: none is to be replaced by another one.
        halves = [[{name: _fixed(held) for name, held in layer.items()} for layer in layers]]
        if parts.halves > 1:
            halves.append([{name: _like(held) for name, held in layer.items()} for layer in layers])
        self._layers = [[MappingProxyType(layer) for layer in half] for half in halves]
        # (halves, layers) by name, slot by slot.
        self._bytes = [
            [
                {
                    name: [bytes_of(f"layers[{n}][{name!r}]", each) for each in held]
                    for name, held in layer.items()
                }
                for n, layer in enumerate(half)
            ]
            for half in halves
        ]

    def layer(self, layer: int) -> Mapping[str, Any]:
        """A layer's tensors as they were passed, a tuple of those that are one for each slot.

        With ``side="double"`` they are other ones after each switch: ask anew in each step.

        Raises:
            ArgumentError: there is no such layer.
        """
        number = check_layer(layer, self.parts.num_layers)
        return self._layers[self.halves[number]][number]

    def check_unchanged(self) -> None:
        """Checks that tensors are where they were: a parameter's data may have been replaced.

        Raises:
            ArgumentError: they are not.
        """
        for n, layer in enumerate(self._layers[0]):
            for name, held in layer.items():
                for slot, each in enumerate(held):
                    if each.data_ptr() != self._bytes[0][n][name][slot].data_ptr() and each.numel():
                        rule = "its memory is another one than when it was adopted"
                        remedy = "Copy into it (copy_), or adopt the weights anew."
                        raise ArgumentError(f"layers[{n}][{name!r}][{slot}]", "replaced", rule, remedy)

    def bytes_of(self, rank: int, half: int, layer: int, name: str, slot: int) -> Bytes:
        """Those of one tensor of an expert of this rank."""
        assert rank == self.rank, "a stage is between ranks"
        return self._bytes[half][layer][name][slot]


def adopt(
    buffer: EPBuffer,
    layers: Sequence[Mapping[str, Held]],
    *,
    side: Side = "layer",
    stage_bytes: int = STAGE_BYTES,
) -> AdoptedWeights:
    """Takes weights that a model holds already. Collective: every rank calls it alike.

    They stay where they are, and other ranks do not see them: what moves is copied twice, into a stage and
    out of it.

    Args:
        buffer: whose ranks they are of.
        layers: of each layer with experts its tensors by name: (slots of this rank, *shape), or one (*shape)
            for each slot; of any dtype, dense, on the CPU. A rank with shared experts alone passes tensors of
            no slots.
        side: "layer": what comes waits in memory of one layer; "double": there is room for all twice.
        stage_bytes: of the memory through which they go, on each rank.

    Raises:
        ArgumentError: a bad argument.
        ConfigMismatchError: ranks disagree.
        WindowError: no memory for it.
        CommunicationTimeoutError: a rank did not come.

    Examples:
        >>> slots = buffer.config.num_local_experts
        >>> layers = [{"w": torch.zeros(slots, 3, 5)} for _ in range(2)]
        >>> weights = adopt(buffer, layers)
        >>> weights.layer(1)["w"] is layers[1]["w"]
        True
        >>> weights.close()
    """
    check_buffer(buffer)
    check_synchronous(buffer)
    num_ranks = buffer.config.num_ranks
    made: list[tuple[Parts, int]] = []

    def asked() -> tuple[int, dict[str, Any]]:
        halves, ring_bytes = num_halves(side), ring_bytes_of(stage_bytes, num_ranks)
        is_routed = buffer.rank >= buffer.config.num_shared_ranks
        slots = buffer.config.num_local_experts
        kinds = _kinds_of(layers, slots if is_routed else 0)
        parts = Parts(len(layers), slots, kinds.specs, halves)
        made.append((parts, ring_bytes))
        said = {**described(parts, side), "ring_bytes": ring_bytes, "dimensions in memory": kinds.orders}
        return HEADER_BYTES + Stage.num_bytes(num_ranks, ring_bytes), said

    memory = buffer.peer_memory(asked)
    parts, ring_bytes = made[0]
    stage = Stage(memory, HEADER_BYTES, buffer.rank, num_ranks, ring_bytes)
    agreement = InMemory(memory, buffer.rank, num_ranks)
    config = buffer.config
    shared = config.num_shared_ranks
    return AdoptedWeights(parts, memory, buffer.rank, config.topology, shared, layers, stage, agreement)


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


def bytes_of(name: str, tensor: torch.Tensor) -> Bytes:
    """A dense tensor's bytes in the order in which they lie, without a copy.

    Raises:
        ArgumentError: it has gaps, is not on the CPU, or its elements are not whole bytes.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, shown(tensor), "it is a tensor", "Pass one.", code=INVALID_ARGUMENT)
    plain = tensor.detach()
    if (error := not_plain_error(name, plain, CPU)) is not None:
        raise error
    if plain.is_quantized or not has_whole_bytes(plain.dtype):
        rule = "its elements are whole bytes that hold all that there is"
        raise ArgumentError(name, f"of {plain.dtype}", rule, "Pass its storage as uint8.")
    if plain.is_conj() or plain.is_neg():
        rule = "it is conjugated or negated when it is read"
        raise ArgumentError(name, "a lazy view", rule, f"Pass {name}.resolve_conj().resolve_neg().")
    dense = plain.permute(order_of(plain))
    if not dense.is_contiguous():
        rule = f"it has gaps (strides {tuple(plain.stride())} of shape {tuple(plain.shape)})"
        raise ArgumentError(name, "with gaps", rule, f"Pass {name}.contiguous().", code=INVALID_ARGUMENT)
    return dense.reshape(-1).view(torch.uint8)


def check_apart(given: Iterable[tuple[str, Bytes]]) -> None:
    """Checks that no bytes are given twice.

    Args:
        given: names, and the bytes.

    Raises:
        ArgumentError: some are.
    """
    spans = sorted((data.data_ptr(), data.data_ptr() + len(data), name) for name, data in given if len(data))
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            rule = f"it shares memory with {name}, and one of them would be written over"
            raise ArgumentError(other, "part of the same memory", rule, "Pass tensors that lie apart.")


def order_of(tensor: torch.Tensor) -> list[int]:
    """Dimensions by how far apart their elements are; last those of one element, which say nothing."""
    shape, strides = tensor.shape, tensor.stride()
    return sorted(range(len(shape)), key=lambda d: (shape[d] == 1, -strides[d], d))


def _like(held: Held) -> Held:
    """Other memory for as many slots, of the same strides."""
    if isinstance(held, torch.Tensor):
        return torch.empty_like(held, requires_grad=False)
    return tuple(torch.empty_like(each, requires_grad=False) for each in held)


def _fixed(held: Held) -> Held:
    return held if isinstance(held, torch.Tensor) else tuple(held)


class Kinds:
    """What an expert consists of, as it is found tensor by tensor, by name.

    Attributes:
        specs: shape and dtype.
        orders: of its dimensions in memory, as lists for JSON.
    """

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self.orders: dict[str, list[int]] = {}

    def add(self, key: str, where: str, tensor: torch.Tensor) -> None:
        """Adds one.

        Raises:
            ArgumentError: another one of that name is not like it.
        """
        found = (tuple(tensor.shape), tensor.dtype), order_of(tensor)
        first = self.specs.setdefault(key, found[0]), self.orders.setdefault(key, found[1])
        if first != found:
            rule = f"another slot or layer has {first[0]}, dimensions in memory {first[1]}"
            raise ArgumentError(where, f"{found[0]}, {found[1]}", rule, "Pass tensors that are alike.")


def _kinds_of(layers: object, slots: int) -> Kinds:
    """What an expert consists of, and whether all are alike.

    Raises:
        ArgumentError: something that is no such weights, or not the same in every slot of every layer.
    """
    if (
        not isinstance(layers, Sequence)
        or not layers
        or not all(isinstance(e, Mapping) and e for e in layers)
    ):
        rule = "it has, for each layer, an expert's tensors by name"
        remedy = 'Pass [{"w13": w13, "w2": w2}, ...].'
        raise ArgumentError("layers", shown(layers), rule, remedy, code=INVALID_ARGUMENT)
    kinds, seen = Kinds(), []
    for n, layer in enumerate(layers):
        if layer.keys() != layers[0].keys():
            rule = f"layer 0 has {sorted(map(str, layers[0]))}"
            raise ArgumentError(
                f"layers[{n}]", f"{sorted(map(str, layer))}", rule, "Pass the same in each layer."
            )
        for key, held in layer.items():
            where = f"layers[{n}][{check_text('layers', key)!r}]"
            for slot, each in enumerate(_slots_of(where, held, slots)):
                seen.append((f"{where}[{slot}]", bytes_of(where, each)))
                kinds.add(key, where, each)
    check_apart(seen if slots else ())
    return kinds


def _slots_of(where: str, held: object, slots: int) -> Sequence[torch.Tensor]:
    """The tensors of a layer's slots; where there are none, what stands for one.

    Raises:
        ArgumentError: they are something else, or not as many.
    """
    tensors: Sequence[torch.Tensor] = ()
    if isinstance(held, torch.Tensor) and held.dim():
        tensors = held.detach().unbind()
    elif isinstance(held, (list, tuple)) and slots:
        tensors = held
    else:
        rule = "it has the slots of this rank in its first dimension"
        raise ArgumentError(where, shown(held), rule, "Pass a tensor, or a list of one for each slot.")
    if len(tensors) != slots:
        rule = f"this rank has {slots} slots"
        raise ArgumentError(where, f"of {len(tensors)}", rule, "Pass the weights of all of them.")
    if isinstance(held, torch.Tensor) and not slots:
        return [torch.empty_strided(held.shape[1:], held.stride()[1:], dtype=held.dtype)]
    return tensors
