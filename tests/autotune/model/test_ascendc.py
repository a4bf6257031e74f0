"""Formulas of the Ascend C kernels: bytes that they say they move, what they grow with, what they refuse."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autotune.model.bodies.ascendc import FORMULAS
from autotune.model.bodies.body import body_of
from autotune.model.constants import machine_named
from autotune.model.cost import Cost, Table, UnknownWorkError, Work, work_of
from autotune.model.traffic import Traffic
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES, STAMP_BYTES, STATUS_ENTRY_BYTES, WORD_BYTES
from moe_triton.schemes.ascendc import KERNELS
from moe_triton.schemes.direct.layout import DirectLayout
from moe_triton.schemes.hierarchy.ascendc import KERNELS as HIERARCHY
from tests.autotune.model.calls import config, launch_of, plan, traffic

A3 = machine_named("A3")
COUNTED = (
    *("dispatch_send", "dispatch_wait", "dispatch_rows", "dispatch_receive", "inband_send", "inband_receive"),
    "inband_collect",
    *("combine_send", "combine_wait"),
)


def cost(
    kernel: str,
    ranks: int = 8,
    tokens: int = 64,
    blocks: int = 48,
    quantize: str | None = "int8",
    rank: int = 0,
) -> Cost:
    scheme = "fullmesh_v2" if kernel.startswith("inband") else "fullmesh_v1"
    settings = config(ranks, tokens, scheme=scheme)
    work = work_of(launch_of(kernel, settings, quantize, blocks), traffic(settings, rank))
    return FORMULAS[kernel](work, A3)


def test_every_kernel_but_those_of_a_hierarchy_has_a_formula() -> None:
    assert FORMULAS.keys() == {kernel.name for kernel in KERNELS if kernel not in HIERARCHY}
    for kernel in HIERARCHY:
        with pytest.raises(UnknownWorkError, match=f"{kernel.name} has no formula"):
            body_of(kernel)


@pytest.mark.parametrize(("quantize", "row_bytes"), [("int8", 7168 + 32), (None, 2 * 7168)])
def test_dispatch_sends_a_row_and_a_stamp_for_each_result(quantize: str | None, row_bytes: int) -> None:
    """And an entry for each of 256 experts, a word to its own memory."""
    sent, found = traffic(config(8, 64)).sent, cost("dispatch_send", quantize=quantize)
    assert found.sent == sent[1:].sum() * (row_bytes + STAMP_BYTES) + 7 * 32 * STATUS_ENTRY_BYTES
    own = sent[0] * (row_bytes + STAMP_BYTES)
    assert found.written == own + 32 * STATUS_ENTRY_BYTES + WORD_BYTES


def test_flags_in_band_add_a_flag_to_each_block() -> None:
    """Of a row and its stamp, which holds its scale."""
    blocks = -(-(7168 + STAMP_BYTES) // BLOCK_DATA_BYTES)
    sent = traffic(config(8, 64, scheme="fullmesh_v2")).sent
    entries = 7 * 32 * STATUS_ENTRY_BYTES
    assert cost("inband_send").sent == sent[1:].sum() * blocks * BLOCK_BYTES + entries


def test_combine_returns_what_came() -> None:
    received = traffic(config(8, 64)).received
    assert cost("combine_send").sent == received[1:].sum() * (2 * 7168 + STATUS_ENTRY_BYTES)
    assert cost("combine_send").read == received.sum() * (2 * 7168 + 3 * WORD_BYTES)


@pytest.mark.parametrize("kernel", COUNTED)
def test_more_tokens_never_take_less(kernel: str) -> None:
    times = [cost(kernel, tokens=tokens).us for tokens in (8, 16, 32, 64, 128)]
    assert all(a <= b for a, b in itertools.pairwise(times))
    if kernel != "dispatch_wait":  # its entries do not depend on tokens
        assert times[0] < times[-1]


@pytest.mark.parametrize("kernel", COUNTED)
def test_more_bytes_never_take_less(kernel: str) -> None:
    def us(hidden: int) -> float:
        scheme = "fullmesh_v2" if kernel.startswith("inband") else "fullmesh_v1"
        settings = config(8, 64, hidden, scheme)
        return FORMULAS[kernel](work_of(launch_of(kernel, settings), traffic(settings)), A3).us

    times = [us(hidden) for hidden in (1024, 2048, 4096, 7168)]
    assert all(a <= b for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("kernel", COUNTED)
def test_more_cores_never_take_longer(kernel: str) -> None:
    """Where others bound them, the core that has most may have a few bytes more than its share: not 0.1%."""
    times = [cost(kernel, tokens=128, blocks=blocks).us for blocks in (1, 2, 4, 8, 16, 24, 48)]
    assert all(a >= b * 0.999 for a, b in itertools.pairwise(times))
    assert times[0] > times[-1]


@pytest.mark.parametrize("kernel", ["dispatch_send", "combine_send", "inband_send"])
def test_farther_ranks_take_longer(kernel: str) -> None:
    near, far = cost(kernel, ranks=16).parts["hops"], cost(kernel, ranks=256).parts["hops"]
    assert near < far


def test_rows_that_stay_are_neither_sent_nor_waited_for() -> None:
    settings = config(8, 64)
    launch = launch_of("combine_send", settings)
    names = [arg.name for arg in launch.kernel.args]
    values = list(launch.values)
    values[names.index("kept_rank")] = 0
    kept = FORMULAS["combine_send"](work_of(replace(launch, values=tuple(values)), traffic(settings)), A3)
    assert kept.written == traffic(settings).received[0] * STATUS_ENTRY_BYTES + WORD_BYTES
    assert kept.sent == cost("combine_send").sent


def test_a_number_of_rows_that_is_not_known_is_an_error() -> None:
    settings = config(8, 64)
    bare = replace(traffic(settings), tables={})
    with pytest.raises(UnknownWorkError, match="recv_offsets of combine_send"):
        FORMULAS["combine_send"](work_of(launch_of("combine_send", settings), bare), A3)


def test_direct_and_exchange_kernels() -> None:
    settings = config(8, 64)
    known = traffic(settings)

    def work(kernel: str, **values: int | tuple[int, ...] | Table) -> Work:
        described = next(each for each in KERNELS if each.name == kernel)
        zeros: dict[str, int | tuple[int, ...] | Table] = {arg.name: 0 for arg in described.args}
        return Work(described, 48, {**zeros, **values}, known)

    rows = {"row_bytes": 7168, "rows_per_token": 1, "num_tokens": 64, "topk": 8}
    rows |= {"num_ranks": 8, "num_local_experts": settings.num_local_experts, "max_count": 64}
    counts = {"counts": DirectLayout(settings).counts.words()}
    plain = FORMULAS["direct_send"](work("direct_send", **rows, **counts), A3)
    scaled = FORMULAS["direct_send"](work("direct_send", **rows, **counts, scale_bytes=224), A3)
    assert plain.sent == known.sent[1:].sum() * (7168 + STAMP_BYTES)
    assert scaled.sent == known.sent[1:].sum() * (7168 + 224 + STAMP_BYTES)
    one = Table(np.array([64]))
    inside = FORMULAS["exchange_send"](work("exchange_send", row_bytes=14336, num_rows=one, peer=0), A3)
    outside = FORMULAS["exchange_send"](work("exchange_send", row_bytes=14336, num_rows=one, peer=2), A3)
    assert (inside.sent, inside.written) == (0, 64 * 14336)
    assert (outside.sent, outside.written) == (64 * 14336, 0)
    few = FORMULAS["post_status"](work("post_status", num_ranks=8), A3)
    many = FORMULAS["counts_send"](work("counts_send", num_ranks=8, num_experts=256), A3)
    assert few.sent == 7 * STATUS_ENTRY_BYTES
    assert many.sent == 7 * (256 * 4 + STATUS_ENTRY_BYTES)
    assert few.us < many.us


def test_two_parts_of_the_tokens_send_the_rows_of_all() -> None:
    settings = config(8, 64)
    known: Traffic = traffic(settings)

    def sent(parts: int) -> list[int]:
        launches = plan(settings, "dispatch", parts=parts).launches
        works = [work_of(each, known) for each in launches if each.kernel.name == "dispatch_send"]
        return [FORMULAS["dispatch_send"](work, A3).sent for work in works]

    assert len(sent(2)) == 2
    assert all(0 < each < sum(sent(1)) for each in sent(2))
    assert sum(sent(2)) == sum(sent(1))


def test_tokens_that_the_model_does_not_know_are_an_error() -> None:
    settings = config(8, 64)
    more = replace(traffic(settings), numbers={**traffic(settings).numbers, "num_tokens": 65})
    with pytest.raises(UnknownWorkError, match="dispatch_send: the call has"):
        FORMULAS["dispatch_send"](work_of(launch_of("dispatch_send", settings), more), A3)


def test_results_of_shared_experts_are_an_error() -> None:
    settings = config(8, 64)
    known = work_of(launch_of("dispatch_send", settings), traffic(settings))
    shared = replace(known, arguments={**known.arguments, "num_shared_ranks": 1})
    with pytest.raises(UnknownWorkError, match="shared experts"):
        FORMULAS["dispatch_send"](shared, A3)
