"""What ``moe-triton doctor --hosts`` says; tests/hosts runs it where there are hosts."""

from __future__ import annotations

import socket

import pytest
from rich.console import Console
from typer.testing import CliRunner

from moe_triton.rendezvous.gates import Gate
from moe_triton.tools.cli import doctor_hosts
from moe_triton.tools.cli.app import app
from moe_triton.tools.cli.doctor_hosts import Found
from moe_triton.tools.cli.host_links import Link


def test_without_a_launcher_it_says_how_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = CliRunner().invoke(app, ["doctor", "--hosts"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "--no-python moe-triton doctor --hosts" in result.output


def test_a_store_that_nobody_hosts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(doctor_hosts, "COME_S", 1.0)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = CliRunner().invoke(app, ["doctor", "--hosts"], env=launched)
    assert result.exit_code == 1
    assert (
        f"rank 1 does not reach the store of all ranks at MASTER_ADDR (127.0.0.1, port {port})"
        in result.stderr
    )


def test_ports_that_refuse_are_named_once_a_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = list(listening.getsockname())
        assert doctor_hosts.out_of_reach([Found("a"), Found("b", place=place)]) == []
    (said,) = doctor_hosts.out_of_reach([Found("a"), Found("b", place=place), Found("b", place=place)])
    assert said.startswith(f"rank 1 cannot be reached at port {place[1]} of 127.0.0.1: nobody listens there.")
    assert "MOE_TRITON_PORTS" in said


def test_what_differs_is_named() -> None:
    of_all = [Found(version=text, providers=["tcp"]) for text in ("a", "b", "a")]
    (said,) = doctor_hosts.differing(of_all)
    assert said.startswith("the version differs: 'a' on rank(s) [0, 2], 'b' on rank(s) [1]. Install the same")
    assert doctor_hosts.differing([of_all[0], of_all[2], Found()]) == []
    (said,) = doctor_hosts.differing([Found(providers=["tcp"]), Found(providers=["verbs"])])
    assert "no provider of libfabric in common" in said
    assert doctor_hosts.differing([Found(providers=["tcp", "verbs"]), Found(providers=["verbs"])]) == []


def test_what_is_wrong_on_several_ranks_is_said_once() -> None:
    assert doctor_hosts.once([["a"], [], ["b", "a"]]) == ["ranks 0, 2: a", "rank 2: b"]


@pytest.mark.parametrize(("leads_to", "is_wrong"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False)])
def test_names_that_lead_to_the_loopback_are_named(
    leads_to: str, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (leads_to, 0))])
    said = doctor_hosts.named_loopback("eth0 10.0.0.1")
    assert [f"leads to {leads_to}" in text and "GLOO_SOCKET_IFNAME to eth0" in text for text in said] == [
        True
    ] * is_wrong
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert doctor_hosts.named_loopback("eth0 10.0.0.1") == []


def test_a_link_that_carries_nothing_has_no_figures() -> None:
    console, of_all = Console(record=True, width=300), [Found("a"), Found("b")]
    links = [Link(0, 1, 20.0, None), Link(1, 0, 20.0, 1.5)]
    doctor_hosts.show(console, of_all, [0, 1], links, [doctor_hosts.silence(links[0])])
    text = console.export_text()
    assert "from host 0 to host 1: what is written does not come" in text
    assert [line.split() for line in text.splitlines() if line.startswith(("0 a", "1 b"))] == [
        ["0", "a", "1", "b", "20.0", "-"],
        ["1", "b", "0", "a", "20.0", "1.50"],
    ]
    assert "well" not in text


def test_on_one_host_nothing_is_measured() -> None:
    console = Console(record=True, width=300)
    doctor_hosts.show(console, [Found("a"), Found("a")], [0, 0], [], [])
    assert "All ranks are on one host" in console.export_text()


def test_a_gate_is_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TRITON_INTERFACE", "lo")
    found, gate = doctor_hosts.look_here()
    assert isinstance(gate, Gate)
    gate.close()
    assert (found.wrong, found.interface, found.place[0]) == ([], "lo 127.0.0.1", "127.0.0.1")
