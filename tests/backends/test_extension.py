"""The extension module by itself: what it is given wrong, it says."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from moe_triton.backends.base import CallSetting
from moe_triton.backends.cpu.calls import NativeCalls, layout_of
from moe_triton.backends.cpu.executable import NativeExecutable, settings_of
from moe_triton.backends.cpu.extension import DTYPE_CODES, extension, new_pool, why_not
from moe_triton.backends.cpu.output_pool import OutputPool
from moe_triton.backends.cpu.waits import NativeWaits
from moe_triton.backends.waits import Waits
from moe_triton.core.call_program import Argument, ArgumentAt, CallProgram, Output, PlanProgram, Registers
from moe_triton.core.errors import ToolchainError
from moe_triton.core.handle import DispatchHandle
from moe_triton.core.plan import Plan
from moe_triton.core.tuning import Tuning
from moe_triton.runtime.rounds import Rounds, RoundsRecord
from moe_triton.schemes.rank_context import RoundFacts
from tests.headers import needs_headers

pytestmark = needs_headers

MODULE = extension()


def make_pool() -> object:
    assert MODULE is not None, why_not()
    return new_pool(MODULE)


def setting(rounds: ctypes.Structure | None = None) -> CallSetting:
    return CallSetting(0, rounds or RoundsRecord(), {}, threading.Lock(), DispatchHandle, Waits(), print)


def native_calls(rounds: ctypes.Structure | None = None) -> NativeCalls:
    assert MODULE is not None
    return NativeCalls(setting(rounds), OutputPool(), MODULE)


def test_the_extension_is_there() -> None:
    assert why_not() == ""


def test_a_record_of_rounds_that_is_laid_out_otherwise_is_refused() -> None:
    assert MODULE is not None
    assert layout_of(RoundsRecord) == MODULE.ROUNDS

    class Other(ctypes.Structure):
        _fields_ = (("counts", ctypes.c_uint32),)

    with pytest.raises(ToolchainError, match=r"built from other sources.*moe-triton build"):
        native_calls(Other())


def program(registers: Registers, key: tuple[int, ...] = ()) -> CallProgram:
    return CallProgram(0, "dispatch", 1, registers, key)


def test_a_module_of_other_sources_is_refused() -> None:
    registers = Registers()
    registers.do("AN OPERATION THAT IT LACKS")
    with pytest.raises(ToolchainError, match=r"built from other sources.*moe-triton build"):
        native_calls().operator(program(registers))


def test_a_step_that_lacks_an_operand_is_refused() -> None:
    registers = Registers()
    registers.do("DIGEST", 0, registers.constant(1))
    with pytest.raises(ToolchainError, match="DIGEST has 4 operands, and 2 are given"):
        native_calls().operator(program(registers))


def test_a_program_of_too_many_arguments_is_refused() -> None:
    with pytest.raises(ValueError, match="too many arguments"):
        native_calls().operator(CallProgram(0, "dispatch", 33, Registers(), ()))


@pytest.mark.parametrize("operand", [1, 300])
def test_a_register_that_is_not_there_is_refused(operand: int) -> None:
    registers = Registers()
    registers.do("MINIMUM", 0, operand)
    with pytest.raises(ValueError, match="no register"):
        native_calls().operator(program(registers))
    with pytest.raises(ValueError, match="no register"):
        native_calls().operator(program(Registers(), key=(operand,)))


def test_a_program_that_needs_too_many_registers_is_refused() -> None:
    registers = Registers()
    for number in range(300):
        registers.constant(number)
    with pytest.raises(ValueError, match="too many registers"):
        native_calls().operator(program(registers))


def test_a_call_that_no_plan_is_for_is_left_to_python() -> None:
    registers = Registers()
    x = registers.tensor(0, Argument("x", ("T", 4), (torch.float32,)))
    call = native_calls().operator(program(registers, (x.dtype,)))
    for argument in (torch.ones(2, 4), torch.ones(2, 5), torch.ones(4), torch.ones(2, 4).int(), None, 5):
        assert call(argument) is None
    with pytest.raises(TypeError, match="dispatch takes 1 arguments"):
        call()


def test_an_operator_of_the_tests_own_runs() -> None:
    """Native code knows no operator: this one gives two tensors in one block and an object as it is."""
    calls, registers = native_calls(Rounds(RoundFacts()).record), Registers()
    registers.tensor(0, Argument("x", ("T", 4), (torch.float32, torch.int8)))
    weights = registers.tensor(1, Argument("weights", ("T",), (torch.float32,), optional=True))
    mode = registers.choice(2, 0, 2)
    key = weights.given, mode, registers.do("ZONE")
    call = calls.operator(CallProgram(1, "toy", 3, registers, key, ("slow", None)))
    of_plan = Registers(registers)
    outputs = Output("twice", ("T", 2), torch.int64), Output("once", ("T",), torch.bfloat16)
    made = of_plan.allocate(outputs, hold=0)
    executable = no_launches()
    results = made["twice"], "as it is", made["once"]
    calls.add(PlanProgram("toy", (1, 1, 0), of_plan, {}, results, tuple), executable)
    x, ones = torch.ones(3, 4), torch.ones(3)
    for unlike in (
        (x, None, None),
        (x, ones[:2], None),
        (x, ones, "slow"),
        (x, ones, "fast"),
        (x.int(), ones, None),
    ):
        assert call(*unlike) is None
    twice, other, once = call(x, ones, None)
    assert (twice.shape, twice.dtype, once.shape, once.dtype) == ((3, 2), torch.int64, (3,), torch.bfloat16)
    assert other == "as it is"
    assert once.data_ptr() - twice.data_ptr() == 64  # one block, each on a cache line of its own
    assert call(x, ones, None) is None  # the other zone has no plan yet


def no_launches() -> NativeExecutable:
    """A plan that does nothing."""
    return NativeExecutable(
        Plan("toy", 0, ()), torch.zeros(1, 16).int(), {}, settings_of(Tuning(), 1), NativeWaits()
    )


def test_a_run_may_go_on_with_a_second_plan_or_leave_that_to_python() -> None:
    rounds = Rounds(RoundFacts())
    calls, registers = native_calls(rounds.record), Registers()
    registers.tensor(0, Argument("x", ("T",), (torch.float32,)))
    most = registers.do("NUMBER", 1)
    call = calls.operator(CallProgram(1, "toy", 2, registers, (registers.do("ZONE"),)))
    first = Registers(registers)
    begun = first.allocate([Output("begun", ("T",), torch.int32)], hold=0)["begun"]
    second = Registers(first)
    second.check("AT_MOST", second.size("T"), most)
    ended = second.allocate([Output("ended", ("T", 2), torch.int8)], hold=1)["ended"]
    for zone in range(2):
        rest = PlanProgram("toy", (), second, {}, (ended, begun), tuple)
        calls.add(PlanProgram("toy", (zone,), first, {}, (begun,), tuple, next=rest), *[no_launches()] * 2)
    assert rounds.counts["combine"] == 0
    of_both = call(torch.ones(3), 3)
    assert [(t.shape, t.dtype) for t in of_both] == [((3, 2), torch.int8), ((3,), torch.int32)]
    assert rounds.counts["combine"] == 1
    (of_first,) = call(torch.ones(4), 3)
    assert (of_first.shape, of_first.dtype) == ((4,), torch.int32)
    assert rounds.counts["combine"] == 1, "the run goes on in Python"
    for unlike in (None, 2.0, torch.tensor(3), 1 << 70):
        assert call(torch.ones(3), unlike) is None


def test_outputs_may_be_arguments_that_share_no_memory_with_others() -> None:
    calls, registers = native_calls(Rounds(RoundFacts()).record), Registers()
    x = registers.tensor(0, Argument("x", ("T",), (torch.int32,)))
    registers.tensor(1, Argument("out", ("T",), (torch.int32,)))
    registers.check("READ", 5, x.address, registers.constant(64))
    registers.check("APART", 1)
    call = calls.operator(CallProgram(1, "toy", 2, registers, (registers.do("ZONE"),)))
    for zone in range(2):
        calls.add(PlanProgram("toy", (zone,), Registers(registers), {}, (ArgumentAt(1),)), no_launches())
    memory = torch.zeros(32, dtype=torch.int32)
    apart, inside = memory[16:20], memory[15:19]
    assert call(memory[:4], apart) is apart
    assert call(memory[:4], memory[:4]) is None
    assert call(memory[:4], inside) is None, "in the last of the 64 bytes that are read"
    assert call(memory[:0], memory[20:20]) is not None, "one without elements shares nothing"


def test_a_plan_that_is_not_as_its_program_says_is_refused() -> None:
    assert MODULE is not None
    calls = native_calls()
    registers = Registers()
    calls.operator(program(registers, (registers.constant(1),)))
    made = calls._programs["dispatch"]
    parts = [bytes(8), b"", b"", b"", bytes(8), None, (), None, (), b"", None, (), b"", None]
    made.add(tuple(parts))
    assert len(made.swap([])) == 1
    wrong = [(0, b""), (2, b"x" * 20), (3, bytes([9, 9])), (6, []), (9, bytes(66))]
    wrong += [(12, bytes(2)), (12, bytes(4))]  # a mark without a register, and on no output
    behind = b"", *parts[1:]
    wrong += [(13, 5), (13, tuple(parts)), (13, (*behind[:-1], behind))]  # a key, and more than two plans
    made.add((*parts[:13], behind))
    made.swap([])
    for position, part in wrong:
        with pytest.raises((TypeError, ValueError)):
            made.add((*parts[:position], part, *parts[position + 1 :]))
    with pytest.raises(TypeError):
        made.swap(())


@pytest.mark.parametrize("kind", ["CallProgram", "Product"])
def test_a_type_of_another_module_cannot_be_a_pool(kind: str) -> None:
    assert MODULE is not None
    with pytest.raises((TypeError, AttributeError)):
        MODULE.CallProgram(pool=getattr(MODULE, kind))


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
