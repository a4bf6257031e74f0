"""The table of launches: every kernel is in it, and no bit of what any of them writes can be wrong unseen."""

from __future__ import annotations

import functools

from moe_triton.backends import make_backend
from moe_triton.kernels import Case, Sizes, families, kernel_cases
from moe_triton.tools.selftest.check import Place, Settings
from moe_triton.tools.selftest.checks.kernels import check_kernel, kernel_checks
from moe_triton.tools.selftest.kernel_cases import check_case, sums_in_its_own_order
from tests.selftest.probes import FlippingBackend, wrong_by_one_bit

HIDDEN, SIZES = 256, Sizes(9, seed=1)
EXPONENT = (1, 0x40)  # byte and bit of a 16-bit float


@functools.cache
def cases(target: str = "cpu") -> list[Case]:
    return [*kernel_cases(SIZES, 0, target), *kernel_cases(SIZES, HIDDEN, target)]


def test_every_kernel_of_the_library_is_in_the_table() -> None:
    assert {case.family for case in cases()} == set(families().values())
    shown = {(family.name, frozenset(f)) for family in families().values() for f in family.shown}
    assert shown <= {(case.family.name, case.shape.features) for case in cases()}


def test_there_is_a_check_for_each_kernel() -> None:
    names = families()
    assert sorted(str(check.arguments[0]) for check in kernel_checks(Settings(quick=True))) == sorted(names)
    whole = kernel_checks(Settings())
    assert {check.arguments[1] for check in whole} == {0, 512, 4096, 7168}
    assert len({check.name for check in whole}) == len(whole)


def test_a_wrong_bit_in_any_output_of_any_kernel_is_seen() -> None:
    """Torch in place of Triton: it is the comparison that is tested."""
    backend = make_backend("cpu", "torch")
    flipped = 0
    for case in cases():
        assert check_case(case, backend, 2) == []
        for name in case.outputs:
            if case.memory[name].numel():
                (said,) = check_case(case, FlippingBackend(backend, name), 2)  # type: ignore[arg-type]
                assert said.startswith(case.name)
                assert f": {name} differs in 1 of" in said
                flipped += 1
    assert flipped > 80


def test_a_changed_input_is_seen() -> None:
    backend = make_backend("cpu", "torch")
    case = next(case for case in cases() if case.kernel.name == "pack")
    (said,) = check_case(case, FlippingBackend(backend, "x"), 1)  # type: ignore[arg-type]
    assert "x differs in 1 of" in said


def test_where_a_target_sums_in_its_own_order_its_last_bits_are_not_compared() -> None:
    own = {case.kernel.name for case in cases("npu") if sums_in_its_own_order(case)}
    assert own == {"rms_norm", "const_alphas"}
    assert not any(sums_in_its_own_order(case) for case in cases("cpu"))
    backend = make_backend("cpu", "torch")
    case = next(case for case in cases("npu") if case.kernel.name == "rms_norm")
    assert check_case(case, FlippingBackend(backend, "y"), 1) == []  # type: ignore[arg-type]
    (said,) = check_case(case, FlippingBackend(backend, "y", EXPONENT), 1)  # type: ignore[arg-type]
    assert "y is not close" in said


def test_a_kernel_that_is_off_by_a_bit_is_told_with_size_and_place() -> None:
    case = next(case for case in cases() if case.kernel.name == "pack")
    (said,) = check_case(wrong_by_one_bit(case), make_backend("cpu", "triton"), 2)
    assert said.startswith("pack/bf16-h256: rows differs in 1 of")


def test_the_check_of_a_kernel_runs_all_its_cases_on_one_block_and_on_all() -> None:
    finding = check_kernel(Place(0, 1, Settings(quick=True)), "pack", 512)
    assert finding.wrong == ()
    blocks = {1, make_backend("cpu", "triton").num_blocks(1)}
    assert finding.figures == {"launches": 3 * len(blocks)}


def test_bytes_that_a_kernel_moves_are_counted_by_kernel_or_inputs() -> None:
    pack = next(case for case in cases() if case.kernel.name == "pack")
    assert pack.bytes_moved == (SIZES.tokens - 1) * (3 * HIDDEN + 4)
    assert next(case for case in cases() if case.kernel.name == "stamps").bytes_moved is None
