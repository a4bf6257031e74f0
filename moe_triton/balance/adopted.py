"""`adopt`: weights that a model holds in memory of its own are moved through a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from moe_triton.balance.agreement import Agreement
from moe_triton.balance.arguments import check_at_least, check_layer
from moe_triton.balance.stage import Bytes, Memory, Stage
from moe_triton.balance.weights import (
    CHECKPOINT_STEPS,
    STAGE_BYTES,
    ExpertWeights,
    Made,
    Parts,
    Side,
    Spec,
    check_buffer,
    described,
    has_whole_bytes,
    num_halves,
    ring_bytes_of,
)
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import check_text, not_plain_error, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.topology import Topology

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
        super().__init__(parts, memory, rank, topology, num_shared_ranks, agreement, stage)
        # What is moved is the tensors' memory: none is to be replaced by another one.
        halves = [[{name: _fixed(held) for name, held in layer.items()} for layer in layers]]
        if parts.halves > 1:
            halves.append([{name: _like(held) for name, held in layer.items()} for layer in layers])
        self._layers = [[MappingProxyType(layer) for layer in half] for half in halves]
        # (halves, layers) by name, slot by slot.
        device = memory.of(rank).device
        self._bytes = [
            [
                {
                    name: [bytes_of(f"layers[{n}][{name!r}]", each, device) for each in held]
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

    def is_staged(self, rank: int) -> bool:
        """All but this rank's own: no other one sees them."""
        return rank != self.rank

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
    checkpoint_steps: int = CHECKPOINT_STEPS,
) -> AdoptedWeights:
    """Takes weights that a model holds already. Collective: every rank calls it alike.

    They stay where they are, and other ranks do not see them: what moves is copied twice, into a stage and
    out of it.

    Args:
        buffer: whose ranks they are of.
        layers: of each layer with experts its tensors by name: (slots of this rank, *shape), or one (*shape)
            for each slot; of any dtype, dense, on the buffer's device. A rank with shared experts alone
            passes tensors of no slots.
        side: "layer": what comes waits in memory of one layer; "double": there is room for all twice.
        stage_bytes: of the memory through which they go, on each rank.
        checkpoint_steps: see `moe_triton.balance.allocate`; on an NPU also steps from one look at what has
            come to the next.

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
    config, made = buffer.config, Made()

    def asked() -> tuple[int, dict[str, Any]]:
        halves, made.ring_bytes = num_halves(side), ring_bytes_of(stage_bytes, config.num_ranks)
        made.every = check_at_least("checkpoint_steps", checkpoint_steps, 1)
        is_routed = buffer.rank >= config.num_shared_ranks
        slots = config.num_local_experts
        kinds = _kinds_of(layers, slots if is_routed else 0, buffer.device)
        made.parts = Parts(len(layers), slots, kinds.specs, halves)
        said = {**described(made.parts, side), **made.said(), "dimensions in memory": kinds.orders}
        return made.num_bytes(config.num_ranks), said

    memory = buffer.peer_memory(asked, lambda: made.out_bytes(config.num_ranks))
    agreement, stage = made.agreement(buffer, memory), made.stage(buffer, memory)
    shared = config.num_shared_ranks
    topology = config.topology
    return AdoptedWeights(made.parts, memory, buffer.rank, topology, shared, layers, stage, agreement)


def bytes_of(name: str, tensor: torch.Tensor, device: torch.device) -> Bytes:
    """A dense tensor's bytes in the order in which they lie, without a copy.

    Raises:
        ArgumentError: it has gaps, is not on the device, or its elements are not whole bytes.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, shown(tensor), "it is a tensor", "Pass one.", code=INVALID_ARGUMENT)
    plain = tensor.detach()
    if (error := not_plain_error(name, plain, device)) is not None:
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

    def like(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(tensor, requires_grad=False)
        made.permute(order_of(made)).reshape(-1).view(
            torch.uint8
        ).zero_()  # no step waits for fresh pages then
        return made

    return like(held) if isinstance(held, torch.Tensor) else tuple(map(like, held))


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


def _kinds_of(layers: object, slots: int, device: torch.device) -> Kinds:
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
                seen.append((f"{where}[{slot}]", bytes_of(where, each, device)))
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
        shape, strides = held.shape[1:], held.stride()[1:]
        return [torch.empty_strided(shape, strides, dtype=held.dtype, device=held.device)]
    return tensors
