"""Whole calls of a rank in native code, where this torch and this installation can do so (`moe_calls`)."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from types import ModuleType

import torch

from moe_triton import native_files
from moe_triton.backends.base import Bindings, CallSetting, Executable, PreparedCalls, WholeCall
from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.executable import NativeExecutable

MODULE = "moe_calls"

# DLPack's code and bits of a dtype, as `Dtype` in kernels_ascendc/calls/tensors.h has them.
_CODES = {torch.bfloat16: 4 << 8 | 16, torch.float16: 2 << 8 | 16}


@functools.cache
def module() -> ModuleType | None:
    """The extension module, or None where it was not built or this torch lacks what it needs."""
    path = native_files.find(f"{MODULE}.so")
    if path is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


class NativeCalls:
    """One native entry per call, for the calls that are as usual.

    Attributes:
        dispatch: ``(x, topk_idx, topk_weights, quantize, smooth_scales)``: its output, or None where the call
            is anything but usual: nothing has happened then.
        combine: ``(y, topk_weights, handle)``: its output, or None.
    """

    def __init__(self, setting: CallSetting, native_module: ModuleType) -> None:
        functions = {"run_plan": "moe_run_plan", "take_ids": "moe_take_ids"}
        facts = {name: native.symbol_address(symbol) for name, symbol in functions.items()}
        self._prepared_type, tell = native_module.Prepared, setting.failed

        # Not a method: native code holds it, and nothing is to lead from there back to here.
        def failed(operator: str, executable: NativeExecutable, result: int, bindings: Bindings) -> None:
            tell(operator, executable, functools.partial(executable.finish, result), bindings)

        self._calls = native_module.RankCalls(
            facts={**setting.facts, **facts},
            tensor_type=torch.Tensor,
            counts=setting.counts,
            rounds=setting.rounds,
            last=setting.last,
            lock=setting.lock,
            output_type=setting.output_type,
            handle_type=setting.handle_type,
            failed=failed,
        )
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
            dtype_code=_CODES[call.dtype],
            quantize=call.quantize,
            smooth=call.smooth,
            weights=call.weights,
            in_place=call.in_place,
            zone=call.zone,
            parts=call.parts,
            tokens=call.tokens,
        )
        calls = self._calls.dispatches if call.operator == "dispatch" else self._calls.combines
        calls.append(prepared)

    def exchange(self, prepared: PreparedCalls) -> PreparedCalls:
        """See `moe_triton.backends.base.Calls`."""
        before = self._calls.dispatches, self._calls.combines
        self._calls.dispatches, self._calls.combines = prepared
        return before
