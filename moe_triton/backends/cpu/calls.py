"""Whole calls of a rank in native code."""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType

from moe_triton.backends.base import Bindings, CallSetting, Executable, PreparedCalls, WholeCall
from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.executable import NativeExecutable
from moe_triton.backends.cpu.extension import DTYPE_CODES, FILE
from moe_triton.backends.cpu.output_pool import OutputPool
from moe_triton.core.errors import ToolchainError


class NativeCalls:
    """One native entry per call, for the calls that are as usual.

    Attributes:
        dispatch: ``(x, topk_idx, topk_weights, quantize, smooth_scales)``: its output, or None where the call
            is anything but usual: nothing has happened then.
        combine: ``(y, topk_weights, handle)``: its output, or None.

    Raises:
        ToolchainError: the module is of other sources than this package.
    """

    def __init__(self, setting: CallSetting, pool: OutputPool, native_module: ModuleType) -> None:
        functions = {"run_plan": "moe_run_plan", "take_ids": "moe_take_ids"}
        facts = {name: native.symbol_address(symbol) for name, symbol in functions.items()}
        self._waits = setting.waits  # native code has an address in it
        facts["holder"] = ctypes.addressof(self._waits.holder)
        self._rounds = setting.rounds  # as above
        facts["rounds"] = ctypes.addressof(self._rounds)
        self._prepared_type, tell = native_module.Prepared, setting.failed

        # Not a method: native code holds it, and nothing is to lead from there back to here.
        def failed(operator: str, executable: NativeExecutable, result: int, bindings: Bindings) -> None:
            tell(operator, executable, functools.partial(executable.finish, result), bindings)

        try:
            if layout_of(type(self._rounds)) != native_module.ROUNDS:
                raise TypeError(f"its record of rounds is {native_module.ROUNDS}")
            self._calls = native_module.RankCalls(
                facts={**setting.facts, **facts},
                pool=pool.native,
                last=setting.last,
                lock=setting.lock,
                output_type=setting.output_type,
                handle_type=setting.handle_type,
                failed=failed,
            )
        except TypeError as error:
            raise ToolchainError(
                f"{FILE} was built from other sources ({error}). {native.REBUILD}"
            ) from error
        self.dispatch = self._calls.dispatch
        self.combine = self._calls.combine

    def add(self, call: WholeCall, executable: Executable) -> None:
        """See `moe_triton.backends.base.Calls`."""
        if not isinstance(executable, NativeExecutable):
            return
        prepared = self._prepared_type(
            executable=executable,
            plan=executable.address,
            holes=executable.holes,
            dtype=call.dtype,
            dtype_code=DTYPE_CODES[call.dtype],
            quantize=call.quantize,
            smooth=call.smooth,
            weights=call.weights,
            in_place=call.in_place,
            zone=call.zone,
            parts=call.parts,
            tokens=call.tokens,
            tokens_address=0 if call.tokens is None else call.tokens.data_ptr(),
        )
        calls = self._calls.dispatches if call.operator == "dispatch" else self._calls.combines
        calls.append(prepared)

    def exchange(self, prepared: PreparedCalls) -> PreparedCalls:
        """See `moe_triton.backends.base.Calls`."""
        before = self._calls.dispatches, self._calls.combines
        self._calls.dispatches, self._calls.combines = prepared
        return before


def layout_of(record: type[ctypes.Structure]) -> str:
    """Name, offset and size of each field, in bytes."""
    fields = ((each[0], getattr(record, each[0])) for each in record._fields_)
    return " ".join(f"{name}@{field.offset}+{field.size}" for name, field in fields)
