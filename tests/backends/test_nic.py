"""Settings of the emulated NIC, words of peers, and a NIC's life beside its window."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu import nic
from moe_triton.backends.cpu.nic import Nic, NicSettings, describe, emulated_nic
from moe_triton.backends.cpu.paced_link import PacedLink
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import MAX_RANKS
from moe_triton.core.reach import QUEUED_BIT, Queues, address_of, token_of
from tests.patience import seconds

QUEUES = Queues(frozenset({1, 2}), (0, 0, 1), 4096)


@given(
    peer=st.integers(0, 2),
    address=st.integers(0, (1 << 48) - 1) | st.builds(token_of, st.integers(0, 1023)),
)
def test_a_word_says_how_a_peer_is_reached(peer: int, address: int) -> None:
    word = QUEUES.word(0, peer, address)
    assert -(1 << 63) <= word < 1 << 63  # an int64 tensor holds it
    assert (bool(word >> QUEUED_BIT & 1), address_of(word)) == (peer in QUEUES.peers, address)
    assert QUEUES.is_inside(0, peer) == (peer != 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("post_us", -1.0),
        ("post_us", float("nan")),
        ("post_us", 2e6),
        ("post_us", "1"),
        ("seed", -1),
        ("seed", 1.5),
        ("ring_items", 0),
        ("cpu", 1 << 20),
        ("keeps_order", "no"),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        NicSettings(**{name: value})
    error = caught.value
    assert error.argument == name
    assert str(value) in str(error.value)
    assert error.rule
    assert error.remedy


def test_a_negative_post_us_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        NicSettings(post_us=-0.5)
    said = "post_us is -0.5, but it must be 0 to 1e+06. Pass a number in this range."
    assert str(caught.value).startswith(said)


def test_numpy_integers_are_integers() -> None:
    settings = NicSettings(seed=np.int64(3), ring_items=np.uint32(8))
    assert type(settings.seed) is int
    assert describe(QUEUES, 0, [1 << 20] * 3, 8192, settings)[0].ring_items == 8


def test_a_seed_has_no_pace() -> None:
    windows = [1 << 20] * 3
    for settings, link in ((NicSettings(seed=1, post_us=2.0), None), (NicSettings(seed=1), PacedLink(1.0))):
        with pytest.raises(ArgumentError, match="seed"):
            describe(QUEUES, 0, windows, 8192, settings, link)


def test_settings_are_those_of_the_innermost_block() -> None:
    assert nic.in_use() == NicSettings()
    with emulated_nic(NicSettings(post_us=1.0)), emulated_nic(NicSettings(seed=5)) as inner:
        assert nic.in_use() is inner
    assert nic.in_use() == NicSettings()


def test_a_nic_is_a_thread_until_it_is_closed() -> None:
    memory = np.zeros(4 * 8192, np.uint8)
    windows = [int(memory.ctypes.data) + 8192 * rank for rank in range(3)]

    def threads() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    before = threads()
    made = Nic(QUEUES, 0, windows, 8192, NicSettings())
    assert made.address
    assert threads() == before + 1
    made.close()
    made.close()
    assert (made.address, threads()) == (0, before)


def test_all_ranks_of_the_largest_group_are_posted_to() -> None:
    memory = np.zeros(3 * 8192, np.uint8)
    own = int(memory.ctypes.data)
    others = frozenset(range(1, MAX_RANKS))
    queues = Queues(others, (0,) * MAX_RANKS, 4096)
    made = Nic(queues, 0, [own] + [own + 8192] * len(others), 8192, NicSettings())
    try:
        for rank in (1, MAX_RANKS - 1):
            remote = address_of(queues.word(0, rank, token_of(rank)))
            assert remote == token_of(rank)
            memory[4096] = rank % 251
            assert made.post(rank, own + 4096, remote + 64, 1)
            deadline = time.monotonic() + seconds(10.0)
            while made.delivered(rank) == 0:
                assert time.monotonic() < deadline, f"nothing has come to rank {rank}"
            assert memory[8192 + 64] == rank % 251
    finally:
        made.close()


def test_a_forked_child_leaves_the_thread_to_its_parent() -> None:
    memory = np.zeros(4 * 8192, np.uint8)
    windows = [int(memory.ctypes.data) + 8192 * rank for rank in range(3)]
    made = Nic(QUEUES, 0, windows, 8192, NicSettings())
    assert threading.active_count() >= 1
    child = os.fork()
    if child == 0:
        made.close()  # would wait for a thread that is not there
        os._exit(7)
    _, status = os.waitpid(child, 0)
    made.close()
    assert os.waitstatus_to_exitcode(status) == 7


def test_times_are_in_nanoseconds_to_the_device() -> None:
    assert describe(QUEUES, 0, [1 << 20] * 3, 8192, NicSettings(post_us=1.5))[0].post_ns == 1500
