"""Usual calls in one native call each: a program for each plan (`moe_triton.core.call_program`).

The key of a plan has settled shapes, dtypes and attributes by then. What is left depends on data.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, finalize

import torch

from moe_triton.backends.base import Calls, Executable
from moe_triton.core.call_program import CallProgram, Output, PlanProgram, Registers, TensorAt
from moe_triton.operators.variants import Variant
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.executables import PlanCalls
from moe_triton.schemes.rank_context import OPERATORS

# Outputs that have memory of their own: the others are small beside them.
LARGE = ("tokens", "out", "normed")
Kind = tuple[Variant, int]


class NativeCalls(PlanCalls):
    """The native calls of one communicator.

    Args:
        calls: the back end's.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._executables: dict[Kind, dict[int, Executable]] = defaultdict(dict)
        self._programs: dict[Kind, WeakSet[PlanCall]] = defaultdict(WeakSet)

    def add(
        self, variant: Variant, zone: int, parts: int, tokens: torch.Tensor | None, executable: Executable
    ) -> None:
        """Registers a plan in every program of its variant and number of parts, now and later."""
        self._executables[variant, parts][zone] = executable
        for program in list(self._programs[variant, parts]):
            self._calls.add(program.plan_program(zone), executable)

    def call(self, program: PlanCall, variant: Variant, parts: int) -> Callable[..., Any]:
        """What runs a program: called with its tensors, its outputs; or None, and nothing has happened.

        Native code forgets the program when its plan does.
        """
        call = self._calls.operator(program.program)
        self._programs[variant, parts].add(program)
        finalize(program, self._calls.remove, program.program.label).atexit = False
        for zone, executable in self._executables[variant, parts].items():
            self._calls.add(program.plan_program(zone), executable)
        return call


class PlanCall:
    """The program of one plan's calls.

    Args:
        operator: "dispatch" or "combine".
        inputs: placeholder and argument of each tensor.
        dims: dimensions of each argument.
        outputs: name, placeholder, shape and dtype of each.
        constants: what each call binds alike.
        num_ids: legal ids.
        ids: rows and columns of the ids.
        index: name of the argument, or of the output, by which a combine knows its dispatch.
        most_rows: rows of results that there can be, and where in their counts the total stands; None for a
            dispatch.
    """

    def __init__(
        self,
        operator: str,
        inputs: tuple[tuple[str, str], ...],
        dims: dict[str, int],
        outputs: list[tuple[str, str, tuple[int, ...], torch.dtype]],
        constants: dict[str, Any],
        num_ids: int,
        ids: tuple[int, int],
        index: str,
        most_rows: tuple[int, int] | None,
    ) -> None:
        registers = Registers()
        address = {
            name: registers.do("TENSOR", slot, count, size=2 + count)
            for slot, (name, count) in enumerate(dims.items())
        }
        self._placeholders = {placeholder: address[name] for placeholder, name in inputs}
        if most_rows:
            most, last = most_rows
            total = registers.do(
                "LOAD", registers.plus(self._placeholders["recv_offsets"], registers.constant(4 * last))
            )
            registers.check("AT_MOST", registers.constant(0), total)
            registers.check("AT_MOST", total, registers.constant(most))
        self._outputs, self._constants, self._num_ids, self._ids = outputs, constants, num_ids, ids
        # Which argument is looked at, or which output is marked.
        names = list(dims) if most_rows else [name for name, *_ in outputs]
        self._looks, self._position = most_rows is not None, names.index(index)
        self._nothing = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, _, shape, dtype in outputs
            if math.prod(shape) == 0
        }
        key = (registers.do("ZONE"),)
        self.program = CallProgram(
            OPERATORS.index(operator), operator, len(dims), registers, key, label=f"{operator} {id(self)}"
        )

    def plan_program(self, zone: int) -> PlanProgram:
        """How it runs in a zone."""
        registers, topk = Registers(self.program.registers), torch.int32
        small = [Output("topk_idx", self._ids, topk)]
        made: dict[str, TensorAt] = {}
        for name, _, shape, dtype in self._outputs:
            if name in LARGE:
                made |= registers.allocate([Output(name, shape, dtype)], hold=1 + len(made))
            elif name not in self._nothing:
                small.append(Output(name, shape, dtype))
        made |= registers.allocate(small, hold=0)
        ids, taken = self._placeholders["topk_idx"], made["topk_idx"]
        rows, columns = (registers.constant(size) for size in self._ids)
        limit = registers.constant(self._num_ids)
        unmasked = registers.constant(0), registers.constant(1)
        # The dtype follows the address.
        registers.check("TAKE_IDS", ids, ids + 1, taken.address, rows, columns, limit, *unmasked)
        digest = registers.do("DIGEST", taken.address, registers.constant(math.prod(self._ids)), *unmasked)
        if self._looks:
            registers.check("MARKED", self._position, digest)
        placeholders = {placeholder: registers.new(value) for placeholder, value in self._constants.items()}
        placeholders |= self._placeholders
        for name, placeholder, _, _ in self._outputs:
            placeholders[placeholder] = (
                made[name].address if name in made else registers.new(self._nothing[name])
            )
        placeholders["topk_idx"] = taken.address
        outputs = tuple(made.get(name) or self._nothing[name] for name, *_ in self._outputs)
        return PlanProgram(
            self.program.label,
            (zone,),
            registers,
            placeholders,
            outputs,
            tuple if len(outputs) > 1 else None,
            {"topk_idx": taken, "num_tokens": rows},
            mark=() if self._looks else (self._position, digest),
        )


def attach(communicator: Communicator) -> None:
    """Lets a communicator's plans be run by native calls too, where its back end has them."""
    calls = communicator.native_calls(0, object)
    if calls is not None:
        communicator.use_calls(NativeCalls(calls))
