"""Calls of operators in native code."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from moe_triton.backends.base import Bindings, CallSetting, Executable, PreparedCalls
from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.executable import NativeExecutable
from moe_triton.backends.cpu.extension import DTYPE_CODES, FILE
from moe_triton.backends.cpu.output_pool import OutputPool
from moe_triton.core.call_program import (
    MAX_KEPT,
    NUM_OPERANDS,
    ArgumentAt,
    CallProgram,
    Constant,
    PlanProgram,
    Registers,
    TensorAt,
)
from moe_triton.core.errors import ToolchainError
from moe_triton.core.marks import MARK


class NativeCalls:
    """Checks, allocates and runs the common calls of operators in native code, without Python.

    Raises:
        ToolchainError: the module was built from other sources than this package.
    """

    def __init__(self, setting: CallSetting, pool: OutputPool, native_module: ModuleType) -> None:
        self._module, tell = native_module, setting.failed
        sizes = (getattr(native_module, name, 0) for name in ("MAX_KEPT", "NUM_OPERANDS"))
        is_like = tuple(sizes) == (MAX_KEPT, NUM_OPERANDS)
        if not is_like or getattr(native_module, "ROUNDS", "") != layout_of(type(setting.rounds)):
            raise ToolchainError(
                f"{FILE} was built from other sources: its record of rounds differs, or its programs' sizes. "
                f"{native.REBUILD}"
            )

        # Not a method: native code keeps it, and must not keep this object alive.
        def failed(
            operator: str, executable: NativeExecutable, result: int, bindings: Bindings, words: bytes
        ) -> bool:
            given = dict(zip(executable.placeholders, memoryview(words).cast("Q").tolist(), strict=True))
            return tell(operator, executable, functools.partial(executable.finish, result), bindings, given)

        self._addressed = setting.rounds, setting.waits  # native code has addresses inside them
        self._shared = {
            "pool": pool.native,
            "owner": setting.owner,
            "rounds": ctypes.addressof(setting.rounds),
            "run_plan": native.symbol_address("moe_run_plan"),
            "take_ids": native.symbol_address("moe_take_ids"),
            "digest_ids": native.symbol_address("moe_digest_ids"),
            "calls_agree": native.symbol_address("moe_calls_agree"),
            "zero_gaps": native.symbol_address("moe_zero_gaps"),
            "holder": ctypes.addressof(setting.waits.holder),
            "last": setting.last,
            "lock": setting.lock,
            "handle_type": setting.handle_type,
            "number_name": "number",
            "product_name": "_memory",
            "mark_name": MARK,
            "failed": failed,
        }
        self._programs: dict[str, Any] = {}

    def operator(self, program: CallProgram) -> Callable[..., Any]:
        """Makes the native program of an operator, and returns the function that calls it."""
        try:
            made = self._programs[program.label or program.name] = self._module.CallProgram(
                operator_id=program.operator_id,
                name=program.name,
                num_arguments=program.num_arguments,
                steps=self._steps(program.registers),
                values=_words(program.registers.values),
                key=_numbers(program.key),
                objects=program.objects,
                **(self._shared | ({"handle_type": program.handle_type} if program.handle_type else {})),
            )
        except (TypeError, KeyError) as error:
            raise ToolchainError(
                f"{FILE} was built from other sources ({error}). {native.REBUILD}"
            ) from error
        call: Callable[..., Any] = made.call
        return call

    def add(self, plan: PlanProgram, *executables: Executable) -> None:
        """Registers a plan that was compiled to native code; any other is left to Python.

        Args:
            plan: how calls run it.
            executables: itself, and those that it goes on with.
        """
        if all(isinstance(executable, NativeExecutable) for executable in executables):
            self._programs[plan.name].add(self._prepared(plan, *executables))

    def _prepared(self, plan: PlanProgram, executable: Any, *behind: Any) -> tuple[Any, ...]:
        """A plan as `PreparedPlan` in kernels_ascendc/calls/call_program.h."""
        kept = plan.kept
        made = {name: _spec(each) for name, each in kept.attributes.items()} if kept else None
        return (
            _words(plan.key),
            _words(plan.registers.values),
            self._steps(plan.registers),
            _numbers([plan.placeholders[name] for name in executable.placeholders]),
            _words([executable.address]),
            executable,
            tuple(map(_spec, plan.outputs)),
            plan.output_type,
            tuple((name, _spec(item)) for name, item in plan.bindings.items()),
            _numbers(kept.registers if kept else ()),
            made,
            tuple((name, _spec(item)) for name, item in kept.fields.items()) if kept else (),
            _numbers(plan.mark),
            self._prepared(plan.next, *behind) if plan.next else None,
        )

    def remove(self, label: str) -> None:
        """Forgets a program and its plans, if there is one of this label."""
        self._programs.pop(label, None)

    def swap(self, prepared: PreparedCalls) -> PreparedCalls:
        """Replaces the plans of all programs, ``{}`` for none, and returns the previous ones."""
        return {name: made.swap(prepared.get(name, [])) for name, made in list(self._programs.items())}

    def _steps(self, registers: Registers) -> bytes:
        numbers, made = self._module.OPERATIONS, []
        for step in registers.steps:
            number, count = numbers[step.operation]
            if len(step.operands) != count:
                raise TypeError(f"{step.operation} has {count} operands, and {len(step.operands)} are given")
            made.append([number, step.target, *step.operands, *[0] * (NUM_OPERANDS - count)])
        return b"".join(map(_numbers, made))


def layout_of(record: type[ctypes.Structure]) -> str:
    """Name, offset and size of each field, in bytes."""
    fields = ((each[0], getattr(record, each[0])) for each in record._fields_)
    return " ".join(f"{name}@{field.offset}+{field.size}" for name, field in fields)


def _words(values: Iterable[Constant]) -> bytes:
    """64 bits each: a dtype as its code, a tensor as its address."""
    words = [
        DTYPE_CODES[value]
        if isinstance(value, torch.dtype)
        else value.data_ptr()
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]
    return struct.pack(f"<{len(words)}q", *words)


def _numbers(values: Sequence[int]) -> bytes:
    """16 bits each."""
    return struct.pack(f"<{len(values)}H", *values)


def _spec(item: object) -> object:
    """A tensor as native code's ``TensorSpec``, an argument as ``ArgumentSpec``, others as they are."""
    if isinstance(item, ArgumentAt):
        return _numbers([item.slot])
    if not isinstance(item, TensorAt):
        return item
    sizes = [*item.sizes, *[0] * (4 - len(item.sizes))]
    return _numbers([item.hold, DTYPE_CODES[item.dtype], item.address, len(item.sizes), *sizes])
