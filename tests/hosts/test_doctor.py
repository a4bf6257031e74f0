"""``moe-triton doctor --hosts`` on hosts that are well, and on some that are not."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from benchmarks.hosts import namespaces
from tests.hosts.test_launchers import LONG, PROGRAMS, torchrun
from tests.patience import seconds
from tests.surroundings import NOWHERE

pytestmark = [
    LONG,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts"),
]


def doctor(
    ranks: int, settings: Sequence[Sequence[str]] = ((), ()), **options: bool
) -> list[namespaces.Ended]:
    """Runs it on two hosts, each with variables of its own."""
    doctor = "--no-python", str(PROGRAMS / "moe-triton"), "doctor", "--hosts"
    commands = torchrun(2, ranks, "static", *doctor)
    commands = [["env", *own, *command] for own, command in zip(settings, commands, strict=True)]
    ended = namespaces.launch(commands, timeout_s=seconds(90), **options)
    assert [each.left for each in ended] == [[], []]
    assert "state" not in ended[1].said, "one table is enough"
    return ended


@pytest.mark.parametrize("ranks", [1, 2])
def test_hosts_that_are_well(ranks: int) -> None:
    first, second = doctor(ranks)
    assert (first.status, second.status) == (0, 0), first.said
    for rank in range(2 * ranks):
        host = rank // ranks
        address = namespaces.address_of(host)
        row = rf"^ *{rank}  {host} host{host} +ok +\d+\.\d+, \S+ +eth0 {address} +/dev/shm, \d+ MB free$"
        assert re.search(row, first.said, re.M), first.said
    links = re.findall(r"^(\d) host\d +(\d) host\d +([\d.]+) +([\d.]+)$", first.said, re.M)
    assert [(a, b) for a, b, *_ in links] == [("0", "1"), ("1", "0")], first.said
    assert all(float(figure) > 0 for _, _, *figures in links for figure in figures)
    assert "All is well." in first.said


@pytest.mark.parametrize(
    ("of_second", "options", "text"),
    [
        (
            ("MOE_TRITON_INTERFACE=none0",),
            {},
            r"rank 1: MOE_TRITON_INTERFACE is 'none0', which is no interface",
        ),
        (("MOE_TRITON_INTERFACE=lo",), {}, r"rank 0: rank 1 cannot be reached at port \d+ of 127.0.0.1"),
        ((f"MOE_TRITON_LIBFABRIC={NOWHERE}",), {}, rf"rank 1: libfabric \({NOWHERE}\) cannot be used"),
        (
            (),
            {"own_name_is_loopback": True},
            r"rank 1: .* host1, leads to 127.0.1.1.* Set GLOO_SOCKET_IFNAME to eth0",
        ),
    ],
    ids=["interface", "port", "library", "name"],
)
def test_what_is_wrong_is_said_on_rank_0(
    of_second: tuple[str, ...], options: dict[str, bool], text: str
) -> None:
    first, second = doctor(1, ((), of_second), **options)
    assert first.status != 0
    assert second.status != 0
    assert re.search(text, first.said), first.said
    assert "ping" not in first.said
