"""Estimates of cycles, by hand."""

from __future__ import annotations

import pytest

from autotune.gate import costs
from autotune.gate.costs import Estimate, estimate
from autotune.gate.page import PAGE
from autotune.gate.stream import Branch, Buffer, Instruction, Loop, Sync
from autotune.model.constants import machine_named

TILE = Buffer("7168xbf16")
LOAD, STORE = Instruction("MTE2", "load", (TILE,)), Instruction("MTE3", "store", (TILE,))
ADD = Instruction("V", "vadd_1d_float", (Buffer("7168xf32"), Buffer("7168xf32")))
ELEMENT = Instruction("S", "load", is_global=True)


def test_copies_share_the_bandwidth() -> None:
    cycles = 14336 / 21.6
    assert estimate([LOAD, STORE]) == Estimate(2 * cycles, cycles, cycles)


def test_a_barrier_makes_a_copying_pipe_wait_for_its_last_copy() -> None:
    barriers = [Sync("barrier", pipe) for pipe in ("MTE2", "MTE3", "V", "ALL")]
    assert estimate([*barriers]) == Estimate(mte2=450, mte3=250)


def test_instructions_of_v_take_a_start_and_their_widest_tile() -> None:
    assert estimate([ADD]).v == 18 + 28672 / 256
    cast = Instruction("V", "vcast_bfloat16_t_to_float_1d", (TILE, Buffer("7168xf32")))
    assert estimate([cast]).v == estimate([ADD]).v


def test_division_and_reduction_take_longer() -> None:
    tiles = (Buffer("64xf32"), Buffer("1xf32"), Buffer("4096xf32"))
    assert estimate([Instruction("V", "vdiv_1d_float", tiles[:2])]).v == 18 + 4
    assert estimate([Instruction("V", "enablevc_reduce_max_r_float", tiles)]).v == 18 + 2


def test_elements_and_flags_keep_their_pipe_busy() -> None:
    nodes = [ELEMENT, Instruction("S", "store"), Sync("set", "S"), Sync("wait", "MTE2"), Sync("set", "M")]
    assert estimate([*nodes]) == Estimate(s=350 + 12 + 6, mte2=6)


def test_loops_of_known_length_are_multiplied_and_others_turn_once() -> None:
    body = [Loop(None, [ELEMENT, Loop(8, [ELEMENT]), Loop(None, [ELEMENT])])]
    assert estimate([*body]).s == 350 * (1 + 8 + 1)


def test_what_is_done_once_a_program_is_left_out() -> None:
    assert estimate([ELEMENT, Loop(None, [STORE])]).s == 0
    assert estimate([ELEMENT, Branch([Loop(None, [ELEMENT])])]).s == 350
    assert estimate([ELEMENT]).s == 350


def test_of_two_branches_the_dearer_one_counts_and_unlikely_ones_not_at_all() -> None:
    assert estimate([Loop(None, [Branch([ELEMENT, ELEMENT], [ELEMENT, ADD])])]) == Estimate(s=700, v=130)
    assert estimate([Loop(None, [Branch([ELEMENT], is_unlikely=True)])]) == Estimate()


@pytest.mark.parametrize(
    ("figures", "bound"),
    [
        ((9, 8, 7, 6, 5), "bandwidth"),
        ((5, 11, 0, 0, 0), "MTE2"),
        ((5, 0, 11, 0, 0), "MTE3"),
        ((5, 10, 0, 0, 0), "bandwidth"),
        ((5, 0, 10, 0, 0), "bandwidth"),
        ((5, 0, 0, 6, 0), "V"),
        ((5, 0, 0, 0, 6), "S"),
        ((5, 0, 0, 5, 0), "bandwidth"),
    ],
)
def test_the_busiest_bounds(figures: tuple[int, ...], bound: str) -> None:
    found = Estimate(*figures)
    assert (found.bound, found.cycles) == (bound, max(figures))


def test_the_constants_are_those_of_the_docs() -> None:
    text, starts = PAGE.read_text(), costs.START_CYCLES
    pairs = {
        "Clock": f"{machine_named('A2').clock_ghz} GHz",
        "Bandwidth": f"{costs.BANDWIDTH} bytes",
        "Start of a copy": f"{starts['MTE2']} cycles on MTE2, {starts['MTE3']} on MTE3",
        "Instruction of V": f"{costs.VECTOR_START} cycles and one for every {costs.VECTOR_BYTES} bytes",
        "Element": f"{costs.SCALAR_GLOBAL} cycles in global memory, {costs.SCALAR_UB} in the unified buffer",
        "Flag": f"{costs.FLAG_CYCLES} cycles",
    }
    for name, figure in pairs.items():
        assert f"| {name} | {figure}" in text
