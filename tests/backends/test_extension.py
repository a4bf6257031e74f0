"""The extension module by itself: what it is given wrong, it says."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from moe_triton.backends.base import CallSetting
from moe_triton.backends.cpu.calls import NativeCalls, layout_of
from moe_triton.backends.cpu.extension import DTYPE_CODES, extension, new_pool, why_not
from moe_triton.backends.cpu.output_pool import OutputPool
from moe_triton.backends.waits import Waits
from moe_triton.core.errors import ToolchainError
from moe_triton.handle import DispatchHandle, DispatchOutput
from moe_triton.runtime.rounds import RoundsRecord
from tests.headers import needs_headers

pytestmark = needs_headers

MODULE = extension()


def make_pool() -> object:
    assert MODULE is not None, why_not()
    return new_pool(MODULE)


def rank_calls(facts: dict[str, int]) -> object:
    assert MODULE is not None
    return MODULE.RankCalls(
        facts=facts,
        pool=make_pool(),
        last={},
        lock=threading.Lock(),
        output_type=DispatchOutput,
        handle_type=DispatchHandle,
        failed=print,
    )


def test_the_extension_is_there() -> None:
    assert why_not() == ""


@pytest.mark.parametrize("facts", [{}, {"hidden": 1}, {f"fact {i}": i for i in range(20)}])
def test_facts_that_are_missing_are_refused(facts: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="facts"):
        rank_calls(facts)


def test_a_module_of_other_sources_is_refused() -> None:
    lock = threading.Lock()
    setting = CallSetting(
        {"hidden": 1}, RoundsRecord(), {}, lock, DispatchOutput, DispatchHandle, Waits(), print
    )
    assert MODULE is not None
    with pytest.raises(ToolchainError, match=r"built from other sources.*moe-triton build"):
        NativeCalls(setting, OutputPool(), MODULE)


def test_a_record_of_rounds_that_is_laid_out_otherwise_is_refused() -> None:
    assert MODULE is not None
    assert layout_of(RoundsRecord) == MODULE.ROUNDS

    class Other(ctypes.Structure):
        _fields_ = (("counts", ctypes.c_uint32),)

    lock = threading.Lock()
    setting = CallSetting({}, Other(), {}, lock, DispatchOutput, DispatchHandle, Waits(), print)
    with pytest.raises(ToolchainError, match="record of rounds"):
        NativeCalls(setting, OutputPool(), MODULE)


def prepared(**changes: object) -> object:
    assert MODULE is not None
    values = {
        "executable": None,
        "plan": 0,
        "holes": ("x",),
        "dtype": torch.bfloat16,
        "dtype_code": DTYPE_CODES[torch.bfloat16],
        "quantize": False,
        "smooth": False,
        "weights": False,
        "in_place": False,
        "zone": 0,
        "parts": 1,
        "tokens": None,
        "tokens_address": 0,
    }
    return MODULE.Prepared(**{**values, **changes})


def test_a_hole_that_no_call_has_a_value_for_is_refused() -> None:
    assert prepared() is not None
    with pytest.raises(ValueError, match="the hole masked_ids"):
        prepared(holes=("x", "masked_ids"))
    with pytest.raises(TypeError):
        prepared(holes=["x"])


@pytest.mark.parametrize("kind", ["HandleMemory", "Prepared"])
def test_a_type_of_another_module_cannot_be_a_pool(kind: str) -> None:
    assert MODULE is not None
    with pytest.raises((TypeError, AttributeError)):
        MODULE.RankCalls(facts={}, pool=getattr(MODULE, kind))


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (((2, 3), torch.complex64), ValueError),
        (((1, 1, 1, 1, 1), torch.int8), ValueError),
        (((-1,), torch.int8), ValueError),
        (((2.5,), torch.int8), TypeError),
        (([2], torch.int8), TypeError),
        (5, TypeError),
    ],
)
def test_an_output_that_cannot_be_is_refused(spec: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        make_pool().empty_all([spec])  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", list(DTYPE_CODES))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 1, 3), (2, 0, 3, 1)])
def test_outputs_are_what_was_asked_for(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    (tensor,) = make_pool().empty_all([(shape, dtype)])  # type: ignore[attr-defined]
    like = torch.empty(shape, dtype=dtype)
    assert type(tensor) is torch.Tensor
    assert (tensor.shape, tensor.dtype, tensor.stride()) == (like.shape, like.dtype, like.stride())
    assert tensor.is_cpu
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.requires_grad
