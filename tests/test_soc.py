"""The table of processors, and how many blocks may meet on one."""

from __future__ import annotations

import pytest

from autotune.npu_compiler.socs import SOC_OF_PRODUCT
from moe_triton.core import ascendc
from moe_triton.core.errors import ArgumentError, ToolchainError
from moe_triton.core.soc import ARCHS, SOCS, check_blocks, soc_of

CORES = {
    "Ascend910B1": 48,
    "Ascend910B2": 48,
    "Ascend910B3": 40,
    "Ascend910B4": 40,
    "Ascend910_9362": 40,
    "Ascend910_9372": 40,
    "Ascend910_9381": 48,
    "Ascend910_9382": 48,
    "Ascend910_9391": 48,
    "Ascend910_9392": 48,
}


@pytest.mark.parametrize(("name", "cores"), CORES.items())
def test_as_many_blocks_as_vector_cores(name: str, cores: int) -> None:
    soc = soc_of(name)
    assert soc.vector_cores == cores
    check_blocks(1, soc)
    check_blocks(cores, soc)
    for blocks in (0, cores + 1):
        with pytest.raises(ArgumentError, match=f"num_blocks is {blocks}, but it must be 1 to {cores}"):
            check_blocks(blocks, soc)


def test_the_error_names_the_processor() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_blocks(48, soc_of("Ascend910B4"))
    assert "Ascend910B4" in str(caught.value)
    assert "SyncAll" in str(caught.value)


def test_products_are_told_by_their_names() -> None:
    assert {soc.product for name, soc in SOCS.items() if "910B" in name} == {"A2"}
    assert {soc.product for name, soc in SOCS.items() if "910_" in name} == {"A3"}
    assert ARCHS == ("dav-2201",)


@pytest.mark.parametrize("name", ["Ascend910B3", "910B3", "ascend910b3", " 910b3 "])
def test_a_name_is_taken_as_tools_spell_it(name: str) -> None:
    assert soc_of(name).name == "Ascend910B3"


@pytest.mark.parametrize("name", ["Ascend310P3", "Ascend910", "", "910B"])
def test_other_processors_are_refused(name: str) -> None:
    with pytest.raises(ToolchainError, match="must be one of A2's or A3's: Ascend910B1, "):
        soc_of(name)


def test_the_kernels_have_room_for_every_processor() -> None:
    assert max(soc.vector_cores for soc in SOCS.values()) == ascendc.MAX_BLOCKS


def test_the_compiler_gate_takes_processors_of_the_table() -> None:
    assert {product: soc_of(name).product for product, name in SOC_OF_PRODUCT.items()} == {
        "A2": "A2",
        "A3": "A3",
    }
