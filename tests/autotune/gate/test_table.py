"""The table holds every kernel, every variant that a plan launches, and every size that the limits allow."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from autotune.gate import SOCS
from autotune.gate.families import parse_case
from autotune.gate.table import DTYPES, HIDDEN, MOST_TOPK, SHARED, TOPK, sample, shown_cases, table
from moe_triton import kernels
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Plan
from moe_triton.core.row_formats import AS_THEY_ARE, INT8, QUANTIZED
from moe_triton.core.tuning import Tuning
from moe_triton.kernels import Shape, families
from moe_triton.kernels.cases import AXES
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.rules import check_config

KERNEL_MODULES = [
    importlib.import_module(f"moe_triton.kernels.{found.name}")
    for found in pkgutil.iter_modules(kernels.__path__)
]


FAMILIES = families()


def variant_of(kernel: TritonKernel) -> object:
    """What differs between two variants, and not between two sizes of one."""
    types = tuple((arg.name, arg.type.replace("fp16", "bf16")) for arg in kernel.args)
    switches = {
        name: value for name, value in kernel.constants.items() if value is None or type(value) is bool
    }
    return kernel.name, kernel.fn, types, sorted(switches.items())


def code_of(kernel: TritonKernel) -> object:
    """All that decides a kernel's code."""
    return kernel.name, kernel.fn, kernel.args, sorted(kernel.constants.items(), key=str)


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "without shared experts": ({}, 0),
    "shared experts' rank": ({"num_shared_experts": 1, "num_shared_ranks": 2}, 0),
    "beside shared experts": ({"num_shared_experts": 1, "num_shared_ranks": 2}, 3),
    "V1": ({"version": 1}, 0),
    "V1, shared expert's rank": ({"version": 1, "num_shared_experts": 1, "num_shared_ranks": 2}, 0),
    "V1, beside the shared expert": ({"version": 1, "num_shared_experts": 1, "num_shared_ranks": 2}, 3),
    "in band": ({"scheme": "fullmesh_v2", "num_shared_experts": 1, "num_shared_ranks": 2}, 3),
    "direct": ({"scheme": "direct"}, 0),
    "A2 between servers": ({"product": "A2", "scheme": "hierarchy", "ranks_per_server": 2}, 0),
    "direct, with shared experts": ({"scheme": "direct", "num_shared_experts": 1, "num_shared_ranks": 2}, 3),
}
BOTH = (False, True)


def variants(config: Config, rank: int) -> Iterator[Variant]:
    """Every variant that a communicator of this kind can be asked for, and some that it would refuse."""
    if config.scheme == "hierarchy":
        formats, given = (AS_THEY_ARE, INT8), (None, torch.int32, torch.int64)
        for row_format, cumulative, ids in product(formats, BOTH, given):
            yield DispatchVariant(
                torch.bfloat16, row_format, weights=True, cumulative=cumulative, given_ids=ids
            )
        for quantize, norm in product(BOTH, BOTH):
            yield CombineVariant(torch.bfloat16, True, block_quantize=quantize, norm=norm)
        return
    is_plain = config.version == 1 or config.scheme != "fullmesh_v1"
    masks = ("none",) if is_plain else ("none", "tokens", "entries")
    exchanges = (False,) if config.scheme == "direct" else BOTH
    quantized = product(QUANTIZED.values(), BOTH)
    given = None, torch.int32, torch.int64
    for (row_format, smooth), weights, mask, cumulative, exchange, waits, ids in product(
        [(AS_THEY_ARE, False), *quantized], BOTH, masks, BOTH, exchanges, BOTH, given
    ):
        yield DispatchVariant(
            torch.bfloat16,
            row_format,
            smooth,
            weights,
            mask,
            cumulative,
            exchange,
            waits,  # type: ignore[arg-type]
            given_ids=ids,
        )
    if config.scheme == "direct":
        yield from (CombineVariant(torch.bfloat16, weights) for weights in BOTH)
        return
    shared_x = BOTH if not is_plain and not config.num_shared_ranks else (False,)
    specials = ((0, 0, 0), (1, 1, 1)) if not is_plain else ((0, 0, 0),)
    for weights, mask, x, special, per_element, quantize, exchange, norm, waits in product(
        BOTH, masks, shared_x, specials, BOTH, BOTH, BOTH, BOTH, BOTH
    ):
        yield CombineVariant(
            torch.bfloat16,
            weights,
            mask,
            x,
            special,
            per_element,
            quantize,
            exchange,
            norm,
            waits,  # type: ignore[arg-type]
        )


@functools.cache
def launched(name: str) -> tuple[TritonKernel, ...]:
    """The Triton kernels of every plan of a kind of communicator, on the NPU, whole and in parts."""
    more, rank = CONFIGS[name]
    config = Config(8, 16, 8192, 8, 24 if more.get("num_shared_ranks") else 32, relaxed=True, **more)
    found = {}
    for variant, parts in product(variants(config, rank), (1, 3)):
        exchange_rank = 0 if variant.exchange else None
        tuning = Tuning(communication_blocks=int(parts > 1))
        context = RankContext(config, rank, 4, 1000, CAPABILITIES["npu"], exchange_rank, tuning)
        plan: Plan = make_scheme(context).whole(variant, 0, parts)
        kernels = [launch.kernel for launch in plan.launches if isinstance(launch.kernel, TritonKernel)]
        found |= {id(kernel): kernel for kernel in kernels}
    return tuple(found.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_variant_that_a_plan_launches_is_in_the_table(name: str) -> None:
    known = {repr(variant_of(case.kernel)) for case in table().values()}
    found = {repr(variant_of(kernel)): kernel for kernel in launched(name)}
    assert len(found) >= 5
    assert not [kernel.name for variant, kernel in found.items() if variant not in known]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_launched_is_what_is_compiled_to_the_last_constant(name: str) -> None:
    known = {repr(code_of(case.kernel)) for case in table().values()}
    unknown = {kernel.name for kernel in launched(name) if repr(code_of(kernel)) not in known}
    if CONFIGS[name][0].get("num_shared_experts"):
        assert not unknown
    else:  # rarer variants are compiled with a shared expert only
        is_of_a2 = CONFIGS[name][0].get("product") == "A2"  # whose slots have other strides
        assert unknown <= {"weighted_sum", "route_pack_smooth", *["arrange"] * is_of_a2}


def test_every_factory_has_a_family() -> None:
    factories = {
        value
        for module in KERNEL_MODULES
        for name, value in vars(module).items()
        if name.endswith("_kernel") and not name.startswith("_") and value.__module__ == module.__name__
    }
    assert len(factories) >= 18
    assert factories == {family.factory for family in FAMILIES.values()}


def test_every_triton_function_is_compiled() -> None:
    functions = {
        value
        for module in KERNEL_MODULES
        for name, value in vars(module).items()
        if name.endswith("_kernel") and name.startswith("_")
    }
    assert len(functions) >= 15
    assert functions == {case.kernel.fn for case in table().values()}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_size_of_a_kernel_is_there(family: Any) -> None:
    shapes = [case.shape for case in table().values() if case.family is family]
    sizes = {"dtype": DTYPES, "hidden": HIDDEN, "topk": (*TOPK, MOST_TOPK), "shared": SHARED}
    for axis in family.axes:
        assert {getattr(shape, axis) for shape in shapes} == set(sizes[axis]), axis
    assert {name for shape in shapes for name in shape.features} == set(family.features)


def test_sizes_that_are_left_out_decide_nothing() -> None:
    others = {"dtype": "fp16", "hidden": 2048, "topk": 3, "shared": 2}
    for family in FAMILIES.values():
        plain = code_of(family.kernel(Shape()))
        for axis in AXES:
            if axis not in family.axes:
                assert code_of(family.kernel(Shape(**{axis: others[axis]}))) == plain, (family.name, axis)


def test_the_ends_of_the_table_are_the_ends_of_the_limits() -> None:
    def allowed(hidden: int, topk: int, shared: int) -> bool:
        try:
            check_config(Config(16, 16, hidden, topk, 96, shared, 4 if shared else 0))
        except ArgumentError:
            return False
        return True

    assert all(allowed(*sizes) for sizes in product(HIDDEN, TOPK, SHARED))
    assert not allowed(min(HIDDEN) - 32, 8, 0)
    assert not allowed(max(HIDDEN) + 32, 8, 0)
    assert not allowed(7168, max(TOPK) + 1, 0)
    assert not allowed(7168, 8, max(SHARED) + 1)
    largest = Config(16, 16, max(HIDDEN), MOST_TOPK, 96, max(SHARED), 4, is_of_buffer=True)
    check_config(largest)
    with pytest.raises(ArgumentError):
        check_config(replace(largest, num_topk=MOST_TOPK + 1))


def test_names_are_read_back() -> None:
    for name, case in table().items():
        family, shape = parse_case(name)
        assert family is case.family
        assert family.case_name(shape) == name
        assert code_of(family.kernel(shape)) == code_of(case.kernel)


def test_what_the_docs_show_is_in_the_table() -> None:
    names = [case.name for case in shown_cases()]
    assert len(set(names)) == len(names)
    assert set(names) <= table().keys()
    assert {case.family.name for case in shown_cases()} == FAMILIES.keys()


def test_a_sample_is_the_same_for_a_seed_and_another_for_another() -> None:
    assert sample(1, 4) == sample(1, 4)
    assert sample(1, 4) != sample(2, 4)
    assert {soc for soc, _ in sample(1, 4)} == SOCS.keys()


def test_kernels_are_built_for_the_npu() -> None:
    for case in table().values():
        assert not case.kernel.constants.get("SCALAR"), case.name  # the form for CPUs
        assert not case.kernel.constants.get("UNROLL"), case.name
        if "target" in inspect.signature(case.family.factory).parameters:
            assert case.kernel.constants.get("FLOAT_MAX", True), case.name
