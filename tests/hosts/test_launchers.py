"""Ranks on several hosts as users start them: by torchrun and by mpirun, on groups of every kind."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.hosts import agent, namespaces
from tests.hosts import launched
from tests.patience import seconds

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts")
LONG = pytest.mark.long

PROGRAMS = Path(sys.executable).parent
EXAMPLE = str(namespaces.ROOT / "examples" / "moe_layer.py")
MASTER = namespaces.address_of(0)
ENDPOINT = f"{MASTER}:{namespaces.PORT}"


def torchrun(num_hosts: int, ranks: int, way: str, *rest: str) -> list[list[str]]:
    """Its command on each host."""
    of_host = "--master-addr", MASTER, "--master-port", str(namespaces.PORT)
    ways = {
        "static": lambda host: ["--node-rank", str(host), *of_host],
        "c10d": lambda host: ["--rdzv-backend", "c10d", "--rdzv-endpoint", ENDPOINT, "--rdzv-id", "7"],
    }
    sizes = "--nnodes", str(num_hosts), "--nproc-per-node", str(ranks)
    return [[str(PROGRAMS / "torchrun"), *sizes, *ways[way](host), *rest] for host in range(num_hosts)]


def check(ended: Sequence[namespaces.Ended]) -> None:
    """That all commands have done what they should, and left nothing."""
    assert [each.status for each in ended] == [0] * len(ended), "\n".join(each.said for each in ended)
    assert [each.left for each in ended] == [[]] * len(ended)


@pytest.mark.long
@pytest.mark.parametrize(("way", "ranks"), [("static", 2), ("c10d", 2)])
def test_torchrun(way: str, ranks: int) -> None:
    ended = namespaces.launch(torchrun(2, ranks, way, EXAMPLE), timeout_s=seconds(90))
    check(ended)
    here = [sorted(map(int, re.findall(r"^rank (\d+): ", each.said, re.M))) for each in ended]
    assert sorted(here) == [list(range(ranks)), list(range(ranks, 2 * ranks))]
    assert sum(each.said.count("same as the dense layer") for each in ended) == 1


@LONG
def test_a_rank_that_fails_is_started_anew_with_its_group(tmp_path: Path) -> None:
    command = torchrun(2, 2, "c10d", "--max-restarts", "1", "-m", "tests.hosts.launched")
    # Else torch's own group finds addresses of the last attempt (pytorch issue 135712).
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", launched.ENDED: str(tmp_path / "ended")}
    ended = namespaces.launch(command, environment=environment, timeout_s=seconds(120))
    check(ended)
    assert (tmp_path / "ended").exists()
    said = re.findall(r"^rank (\d): wrong (.*)$", "".join(each.said for each in ended), re.M)
    assert sorted(said) == [(str(rank), "[]") for rank in range(4)]


@LONG
def test_mpirun() -> None:
    """As docs/hosts.md has it, but for what stands in for ssh."""
    ssh = "--prtemca", "plm_ssh_agent", f"{sys.executable} {agent.__file__}"
    address = "-x", f"MASTER_ADDR={MASTER}", "-x", f"MASTER_PORT={namespaces.PORT}"
    options = "--allow-run-as-root", *ssh, "--host", "host0:2,host1:2", "--bind-to", "none", *address
    names = "RANK", "LOCAL_RANK"
    variables = " ".join(f"{name}=$OMPI_COMM_WORLD_{name}" for name in names)
    script = f"{variables} WORLD_SIZE=$OMPI_COMM_WORLD_SIZE exec {sys.executable} {EXAMPLE}"
    ended = namespaces.launch(
        [[str(PROGRAMS / "mpirun"), *options, "sh", "-c", script], []], timeout_s=seconds(90)
    )
    check(ended)
    assert sorted(re.findall(r"^rank (\d): ", ended[0].said, re.M)) == list("0123")
    assert ended[0].said.count("same as the dense layer") == 1


@LONG
def test_groups_of_ranks_from_several_hosts() -> None:
    assert namespaces.run(launched.in_new_groups, (2, 2), timeout_s=seconds(60)) == [[]] * 4


@LONG
def test_a_group_without_a_store_where_own_names_lead_to_the_loopback() -> None:
    """As Debian's do. Nobody resolves the names of other hosts, either."""
    options = {"own_name_is_loopback": True, "environment": {"GLOO_SOCKET_IFNAME": "eth0"}}
    results = namespaces.run(launched.without_a_store, (1, 1), timeout_s=seconds(60), **options)
    assert results == [[[], MASTER]] * 2
