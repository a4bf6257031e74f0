"""The table of launches: every kernel is in it, and no bit of what any of them writes can be wrong unseen."""

from __future__ import annotations

import functools
import inspect

import moe_triton.kernels
from moe_triton.backends import make_backend
from moe_triton.core.plan import Hole
from moe_triton.tools.selftest.check import Place
from moe_triton.tools.selftest.checks.kernels import check_kernel, kernel_checks
from moe_triton.tools.selftest.kernel_cases import KernelCase, check_case, kernel_cases
from moe_triton.tools.selftest.settings import Settings
from tests.selftest.probes import FlippingBackend, wrong_by_one_bit

HIDDEN, TOKENS = 256, 9
EXPONENT = (1, 0x40)  # byte and bit of a 16-bit float


@functools.cache
def cases(target: str = "cpu") -> list[KernelCase]:
    return [*kernel_cases(1, TOKENS, 0, target), *kernel_cases(1, TOKENS, HIDDEN, target)]


def test_every_kernel_of_the_library_is_in_the_table() -> None:
    factories = [f for name, f in inspect.getmembers(moe_triton.kernels) if name.endswith("_kernel")]
    functions = {inspect.unwrap(f).__module__ for f in factories}
    assert {case.kernel.fn.fn.__module__ for case in cases()} == functions
    source = "\n".join(inspect.getsource(inspect.getmodule(f)) for f in map(inspect.unwrap, factories))  # type: ignore[arg-type]
    assert {case.kernel.name for case in cases()} == {
        line.split('"')[1] for line in source.splitlines() if line.strip().startswith('name="')
    }


def test_there_is_a_check_for_each_kernel() -> None:
    names = {case.kernel.name for case in cases()}
    assert sorted(str(check.arguments[0]) for check in kernel_checks(Settings(quick=True))) == sorted(names)
    whole = kernel_checks(Settings())
    assert {check.arguments[1] for check in whole} == {0, 512, 4096, 7168}
    assert len({check.name for check in whole}) == len(whole)


def outputs(case: KernelCase) -> list[str]:
    """Memory that a case writes to."""
    written = [case.values[arg.name] for arg in case.kernel.args if arg.direction in ("out", "inout")]
    return sorted({hole.name for hole in written if isinstance(hole, Hole)})


def test_a_wrong_bit_in_any_output_of_any_kernel_is_seen() -> None:
    """Torch in place of Triton: it is the comparison that is tested."""
    backend = make_backend("cpu", "torch")
    flipped = 0
    for case in cases():
        assert check_case(case, backend, 2) == []
        for name in outputs(case):
            if case.memory[name].numel():
                (said,) = check_case(case, FlippingBackend(backend, name), 2)  # type: ignore[arg-type]
                assert said.startswith(f"{case.kernel.name} ({case.variant}): {name} differs in 1 of")
                flipped += 1
    assert flipped > 80


def test_a_changed_input_is_seen() -> None:
    backend = make_backend("cpu", "torch")
    case = next(case for case in cases() if case.kernel.name == "pack")
    (said,) = check_case(case, FlippingBackend(backend, "x"), 1)  # type: ignore[arg-type]
    assert "x differs in 1 of" in said


def test_where_a_target_sums_in_its_own_order_its_last_bits_are_not_compared() -> None:
    own = {case.kernel.name for case in cases("npu") if case.sums_in_its_own_order}
    assert own == {"rms_norm", "const_alphas"}
    assert not any(case.sums_in_its_own_order for case in cases("cpu"))
    backend = make_backend("cpu", "torch")
    case = next(case for case in cases("npu") if case.kernel.name == "rms_norm")
    assert check_case(case, FlippingBackend(backend, "y"), 1) == []  # type: ignore[arg-type]
    (said,) = check_case(case, FlippingBackend(backend, "y", EXPONENT), 1)  # type: ignore[arg-type]
    assert "y is not close" in said


def test_a_kernel_that_is_off_by_a_bit_is_told_with_size_and_place() -> None:
    case = next(case for case in cases() if case.kernel.name == "pack")
    (said,) = check_case(wrong_by_one_bit(case), make_backend("cpu", "triton"), 2)
    assert said.startswith("pack (bfloat16): rows differs in 1 of")


def test_the_check_of_a_kernel_runs_all_its_cases_on_one_block_and_on_all() -> None:
    finding = check_kernel(Place(0, 1, Settings(quick=True)), "pack", 512)
    assert finding.wrong == ()
    blocks = {1, make_backend("cpu", "triton").num_blocks(1)}
    assert finding.figures == {"launches": 2 * len(blocks)}


def test_bytes_that_a_kernel_moves_are_its_own_count() -> None:
    pack = next(case for case in cases() if case.kernel.name == "pack")
    assert pack.bytes_moved == (TOKENS - 1) * (3 * HIDDEN + 4)
    assert next(case for case in cases() if case.kernel.name == "keep").bytes_moved is None
