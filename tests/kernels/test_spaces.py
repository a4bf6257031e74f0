"""Settings change no bit: every kernel that has a space, with other settings than its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_triton.backends.cpu.triton.launch import launch
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels import Case, Shape, Sizes, families
from moe_triton.tables import keys_of

HIDDEN = 1024
FEW = 1
PROGRAMS = 40
"""So that programs outnumber tokens, as on an NPU, and some share one."""


def _cases() -> Iterator[Case]:
    """Every variant that docs show, for both targets, if it has anything to choose."""
    for family in families().values():
        for features in family.shown:
            for target in ("cpu", "npu"):
                shape = Shape(
                    hidden=HIDDEN, topk=3, features=frozenset(features), target=target, zoned=target == "npu"
                )
                case = Case(family, shape, Sizes(tokens=12))
                if case.kernel.space is not None:
                    yield case


CASES = {f"{case.name}-{case.shape.target}": case for case in _cases()}
# Each compiles its kernel twice: the others are for `make test-long`.
MAIN = {name for name, case in CASES.items() if case.shape.features == frozenset(case.family.main)}
BY_NAME = [pytest.param(name, marks=[] if name in MAIN else [pytest.mark.long]) for name in CASES]


def _others(kernel: TritonKernel) -> list[dict[str, int]]:
    assert kernel.space is not None
    _, *others = kernel.space.candidates(kernel.settings)
    return others


def _compare(case: Case, candidates: list[dict[str, int]]) -> None:
    expected = case.run(launch, PROGRAMS)
    for values in candidates:
        memory = {name: tensor.clone() for name, tensor in case.memory.items()}
        kernel = case.kernel.with_settings(values)
        launch(kernel, list(case.arguments(memory).values()), PROGRAMS)
        for name in case.outputs:
            found, wanted = memory[name].view(torch.uint8), expected[name].view(torch.uint8)
            assert torch.equal(found, wanted), f"{values} changes {name}"


@pytest.mark.parametrize("name", BY_NAME)
def test_other_settings_give_the_same_bits(name: str) -> None:
    others = _others(CASES[name].kernel)
    assert others, "a space of a single setting"
    _compare(CASES[name], random.Random(name).sample(others, min(FEW, len(others))))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MAIN))
def test_all_settings_give_the_same_bits(name: str) -> None:
    _compare(CASES[name], _others(CASES[name].kernel))


def _shapes() -> Iterator[Shape]:
    sizes = itertools.product(("bf16", "fp16"), (1024, 2048), (3, 4), (0, 1), ("cpu", "npu"), (False, True))
    for dtype, hidden, topk, shared, target, zoned in sizes:
        yield Shape(dtype, hidden, topk, shared, target=target, zoned=zoned)


def test_tables_tell_kernels_apart() -> None:
    """A row is of one code, whatever the sizes and the features."""
    found: dict[object, TritonKernel] = {}
    for family, shape in itertools.product(families().values(), _shapes()):
        for features in (*family.variants, family.main):
            kernel = family.kernel(replace(shape, features=frozenset(features)))
            if kernel.space is not None:
                sizes = tuple(kernel.space.sizes.get(name, 1) for name in ("hidden", "topk"))
                assert found.setdefault((shape.target, keys_of(kernel), sizes), kernel) == kernel


def test_what_has_nothing_to_choose() -> None:
    """All others have a space: a new kernel declares one, or joins these.

    Those that only copy rows always gain from double buffers.
    """
    without = {
        name for name, family in families().items() if family.kernel(Shape(target="npu")).space is None
    }
    copies = {"append", "arrange", "arrange_own", "arrange_part", "gather_rows", "scatter_rows"}
    of_ranks = {"one_per_rank", "local_ids", "local_counts"}
    words = {"add_counts", "inner_table", "map_experts", "outer_table", "places", "starts"}
    assert without == copies | of_ranks | words | {"waits_of_dispatch"}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_own_settings_are_allowed(name: str) -> None:
    kernel = CASES[name].kernel
    assert kernel.with_settings(kernel.settings) is kernel
    assert kernel.space is not None
    kernel.space.check(kernel.name, kernel.settings)
    for values in _others(kernel):
        assert kernel.with_settings(values).settings == values
