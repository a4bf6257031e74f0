"""Meetings of ranks when the store's host is lost, and in groups that have no store."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_triton import CommunicationTimeoutError, ConfigMismatchError
from moe_triton.core.errors import WindowError
from moe_triton.core.threads import Deadline
from moe_triton.processes import RankFailedError, run_ranks
from moe_triton.rendezvous import hosting, meeting
from moe_triton.rendezvous.attempts import Attempt
from moe_triton.rendezvous.meeting import Meeting, _store_of, shared_store_of
from tests.patience import seconds

LOOPBACK, LISTENS = "0100007F", "0A"  # as /proc/net/tcp has them


def over_tcp(rank: int, num_ranks: int) -> None:
    """The default group anew, with a store that rank 0's process hosts, at whichever port is free."""
    store_at = functools.partial(
        dist.TCPStore,
        "localhost",
        is_master=rank == 0,
        timeout=timedelta(seconds=seconds(30)),
        wait_for_workers=False,
    )
    store = store_at(port=0) if rank == 0 else None
    port = torch.tensor([store.port if store else 0])
    dist.broadcast(port, src=0)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=store or store_at(port=int(port)),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=seconds(30)),
    )


def without_a_host(rank: int, num_ranks: int, how: int) -> str:
    over_tcp(rank, num_ranks)
    pids = [m["pid"] for m in Meeting(None, 20.0).exchange({"pid": os.getpid()}, "pids")]
    # Rank 1 needs the store no longer.
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
        os.kill(os.getpid(), how)  # a stopped process goes on when rank 1 has seen enough
        return ""
    dist.send(torch.zeros(1), dst=0)
    with pytest.raises(CommunicationTimeoutError) as caught:
        Meeting(None, 1.0).exchange({}, "another time")
    if how == signal.SIGSTOP:
        os.kill(pids[0], signal.SIGCONT)
    return str(caught.value)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_whose_host_is_gone_or_stopped_is_named(how: int) -> None:
    first, second = run_ranks(without_a_host, 2, (how,), allow_failures=True)
    assert isinstance(first, RankFailedError) == (how == signal.SIGKILL)
    assert "the store of the process group does not answer (another time)" in second


@contextmanager
def no_store() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_get_process_group_store", lambda group: None)
        yield


def without_a_store(rank: int, num_ranks: int) -> list[list[int]]:
    with no_store():
        met = [Meeting(None, 20.0).exchange({"rank": rank}, "ranks") for _ in range(2)]
    return [[message["rank"] for message in messages] for messages in met]


def test_a_group_without_a_store_gets_one() -> None:
    assert run_ranks(without_a_store, 3) == [[[0, 1, 2]] * 2] * 3


def listening_on(port: int) -> set[str]:
    """Local addresses that a socket of this machine listens on at a port, as hexadecimal digits."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / table).read_text(encoding="ascii").splitlines()[1:]:
            (address, its_port), state = line.split()[1].split(":"), line.split()[3]
            if state == LISTENS and int(its_port, 16) == port:
                found.add(address)
    return found


def beside_another_user(rank: int, num_ranks: int) -> tuple[set[str], list[list[int]], list[str]]:
    """Somebody who reaches the store writes to it before ranks meet: a message, ends of rounds, notes."""
    world = dist.group.WORLD
    assert world is not None
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_triton").addHandler(handler)
    with no_store():
        shared_store_of(world)
        ours = meeting._stores[world]
        addresses = listening_on(ours.port)
        if rank == 1:
            theirs = dist.TCPStore(ours.host, ours.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
            lie = json.dumps({"purpose": "ranks", "message": {"rank": 7}})
            forged = {
                "0/0/0": lie,
                "0/0/state": 'refused 0 "lies"',
                "open": "5",
                "next/0": "3",
                "1/0/state": "x",
            }
            for key, value in forged.items():
                theirs.set(f"moe_triton/0.1/{key}", value)
        dist.barrier()
        met = [Meeting(None, seconds(20)).exchange({"rank": rank}, "ranks") for _ in range(2)]
    return addresses, [[message["rank"] for message in messages] for messages in met], heard


def test_a_store_of_ours_is_on_the_loopback_and_nobody_else_has_a_say_in_it() -> None:
    done = run_ranks(beside_another_user, 2)
    for addresses, met, _ in done:
        assert addresses == {LOOPBACK}
        assert met == [[0, 1]] * 2
    said = [text for _, _, heard in done for text in heard]
    assert any("0/0/state, which none of its ranks has written: ignored" in text for text in said)


def with_a_late_rank(rank: int, num_ranks: int) -> tuple[str, int, int]:
    """Rank 0 gives up before a store is made, and tries again."""
    own: Any = distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    said = ""
    with no_store():
        if rank == 0:
            with pytest.raises(CommunicationTimeoutError) as caught:
                Meeting(None, 0.1).exchange({}, "too early")
            said = str(caught.value)
            own.set("come", "")
        own.wait(["come"], timedelta(seconds=seconds(60)))
        met = len(Meeting(None, seconds(20)).exchange({}, "in time"))
    total = torch.ones(1)
    dist.all_reduce(total)  # nothing of ours is left in the group
    return said, met, int(total)


def test_ranks_without_a_store_meet_after_one_was_late() -> None:
    (said, *first), (_, *second) = run_ranks(with_a_late_rank, 2, timeout_s=seconds(120))
    assert "the store of the process group is not there (too early)" in said
    assert first == second == [2, 2]


def on_several_hosts(rank: int, num_ranks: int, other: str) -> tuple[int, set[str]]:
    with pytest.MonkeyPatch.context() as patch, no_store():
        patch.setattr(hosting, "_network", lambda: f"network-{rank}")
        if rank:
            patch.setattr(socket, "gethostname", lambda: other)
        met = len(Meeting(None, seconds(20)).exchange({}, "ranks"))
    return met, listening_on(meeting._stores[dist.group.WORLD].port)  # type: ignore[index]


def without_room_for_a_store(rank: int, num_ranks: int) -> str:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no descriptor")

    with pytest.MonkeyPatch.context() as patch, no_store():
        patch.setattr(hosting, "_listening_on", fail)
        patch.setattr(dist, "TCPStore", fail)
        with pytest.raises(WindowError) as caught:
            Meeting(None, seconds(20)).exchange({}, "ranks")
    return str(caught.value)


def test_a_store_for_several_hosts_is_on_the_address_towards_them() -> None:
    other = "192.0.2.77"  # for documentation: nothing is sent there
    towards = hosting.address_towards([other])
    if towards is None or towards[0] != socket.AF_INET:
        pytest.skip("this machine has no network")
    address = f"{int.from_bytes(socket.inet_aton(towards[1]), sys.byteorder):08X}"
    assert run_ranks(on_several_hosts, 2, (other,)) == [(2, {address})] * 2


def test_a_store_for_hosts_that_no_name_leads_to_is_reached_all_the_same() -> None:
    (first, _), (second, _) = run_ranks(on_several_hosts, 2, ("localhost",))
    assert first == second == 2


def test_the_interface_that_is_named_comes_before_names_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # leads to no other host, as where there is none
    assert hosting._own_address() is None
    monkeypatch.setenv("MOE_TRITON_INTERFACE", "lo")
    assert hosting._own_address() == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv("MOE_TRITON_INTERFACE", "none0")
    with pytest.raises(WindowError, match="MOE_TRITON_INTERFACE is 'none0', which is no interface"):
        hosting._own_address()


def test_a_first_rank_that_can_host_no_store_tells_all() -> None:
    assert [("OSError: no descriptor" in said) for said in run_ranks(without_room_for_a_store, 2)] == [
        True
    ] * 2


def test_names_that_lead_to_no_other_host_name_no_address() -> None:
    assert hosting.address_towards(["localhost"]) is None
    assert hosting.address_towards(["no-such-host.invalid"]) is None


def with_a_bad_state(rank: int, num_ranks: int) -> str:
    """Of a store of the group's own, whose values have no code."""
    store: Any = _store_of(dist.group.WORLD, range(num_ranks))
    if rank == 0:
        store.set("0/0/state", "x")
        store.set("open", "y")
    dist.barrier()
    with pytest.raises(ConfigMismatchError) as caught:
        Meeting(None, seconds(20)).exchange({}, "ranks")
    return str(caught.value)


def test_a_store_in_which_others_write_is_an_error_of_ours() -> None:
    for said in run_ranks(with_a_bad_state, 2):
        assert "holds 'y' as open, below moe_triton/" in said


def for_other_ends(rank: int, num_ranks: int) -> tuple[str, int]:
    with pytest.raises(ConfigMismatchError) as caught:
        Meeting(None, 20.0).exchange({}, "breakfast" if rank else "dinner")
    total = torch.ones(1)
    dist.all_reduce(total)
    return str(caught.value), int(total)


def test_ranks_that_meet_for_different_ends_are_told_so() -> None:
    (first, _), (second, total) = run_ranks(for_other_ends, 2)
    assert first == "rank 1 met for 'breakfast', this one for 'dinner'"
    assert second == "rank 0 met for 'dinner', this one for 'breakfast'"
    assert total == 2


BAD_MESSAGES = [b"\xff\xfe", b"[1, 2]", b'{"purpose": "x"}', b'{"purpose": "x", "message": 3}', b"null"]


def garbage(rank: int, num_ranks: int, number: int) -> str:
    if rank == 1:
        attempt = Attempt(_store_of(dist.group.WORLD, range(num_ranks)), rank, num_ranks)
        attempt.exchange(BAD_MESSAGES[number], Deadline(20.0), threading.Event())
        return ""
    with pytest.raises(ConfigMismatchError) as caught:
        Meeting(None, 20.0).exchange({}, "x")
    return str(caught.value)


@pytest.mark.parametrize("number", range(len(BAD_MESSAGES)))
def test_a_message_that_is_none_is_refused(number: int) -> None:
    said = run_ranks(garbage, 2, (number,))[0]
    assert said.startswith("rank 1 sent ")


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def interrupted(rank: int, num_ranks: int, giving_up_s: float) -> bool:
    """Ctrl-C while rank 1 does not come; then both meet, though the first meeting takes long to end."""
    if rank == 0:
        give_up = Attempt._give_up

        def slowly(*arguments: Any) -> str:
            time.sleep(giving_up_s)
            return give_up(*arguments)

        Attempt._give_up = slowly  # type: ignore[method-assign]
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            Meeting(None, 100.0).exchange({}, "nobody comes")
    dist.barrier()
    return len(Meeting(None, 20.0).exchange({}, "both come")) == num_ranks


@pytest.mark.parametrize("giving_up_s", [0.0, 0.5])
def test_ctrl_c_ends_a_meeting_long_before_its_deadline(giving_up_s: float) -> None:
    assert run_ranks(interrupted, 2, (giving_up_s,), timeout_s=seconds(60)) == [True, True]


def test_who_refuses_stays_until_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may host the store that the others look into."""
    know = [1, 2, 2, 3]
    attempt: Any = SimpleNamespace(refuse=lambda reason: "round", told=lambda key: know.pop(0))
    alone = Meeting(None, 5.0)
    monkeypatch.setattr(alone, "num_ranks", 3)
    monkeypatch.setattr(alone, "_attempt", attempt)
    monkeypatch.setattr(meeting, "_LINGER_S", seconds(60.0))
    alone.refuse(ValueError("no"))
    assert know == []
