"""Rounds of ranks that share no memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import namespaces
from moe_triton.rendezvous.process_ends import BY_LINE
from tests import test_pipeline_tables, test_scheme_tables
from tests.hosts import rounds
from tests.patience import UNTIL_MASKED_S, seconds

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts")
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("scheme", "row_format", "hosts"),
    [
        ("fullmesh_v1", "", (2, 1)),
        ("hierarchy", "int8", (2, 2)),
        pytest.param("fullmesh", "int8", (2, 2), marks=LONG),
        pytest.param("fullmesh_v1", "int8", (1, 1, 1), marks=LONG),
        pytest.param("hierarchy", "", (1, 1, 1), marks=LONG),
    ],
)
def test_rounds(scheme: str, row_format: str, hosts: tuple[int, ...]) -> None:
    results = namespaces.run(rounds.rounds, hosts, scheme, row_format, timeout_s=seconds(60))
    host_of = [f"host{number}" for number, ranks in enumerate(hosts) for _ in range(ranks)]
    assert [each["wrong"] for each in results] == [[]] * sum(hosts)
    assert [each["signs"] for each in results] == [[BY_LINE]] * sum(hosts)
    assert [each["host"] for each in results] == host_of
    assert all(each["sizes"] == list(hosts) for each in results)
    for each in results:
        assert each["written"] >= each["posted"] > 0
    for host in set(host_of):
        of_host = [each for each in results if each["host"] == host]
        assert max(each["sent"] for each in of_host) >= sum(each["posted"] for each in of_host)


@pytest.mark.parametrize(
    "environment",
    [
        {"MASTER_ADDR": namespaces.address_v6_of(0)},
        {"MOE_TRITON_INTERFACE": "eth0", "MOE_TRITON_PORTS": "40000-40003"},
        {"MOE_TRITON_PROVIDER": "tcp;ofi_rxm"},
    ],
)
@pytest.mark.long
def test_ways_between_hosts(environment: dict[str, str]) -> None:
    arguments = "fullmesh_v1", ""
    results = namespaces.run(
        rounds.rounds, (2, 1), *arguments, timeout_s=seconds(60), environment=environment
    )
    assert [each["wrong"] for each in results] == [[]] * 3


@pytest.mark.long
def test_tables_of_hosts_may_differ(tmp_path: Path) -> None:
    schemes, size = ("fullmesh_v1", "fullmesh"), (len(os.sched_getaffinity(0)), 3, 64, 2, 4)
    folders = [tmp_path / name for name in "aab"]
    for folder, other, parts in ((folders[0], "fullmesh_v2", 1), (folders[2], "direct", 2)):
        test_scheme_tables.write(folder, {("own", 4): "fullmesh_v1", ("window", 4): other})
        test_pipeline_tables.write(folder, {size: f"post_parts={parts}"}, "fullmesh")
    given = schemes, [str(each) for each in folders]
    results = namespaces.run(rounds.by_tables, (2, 1), *given, timeout_s=seconds(60))
    assert results == [[[scheme, True] for scheme in schemes]] * 3


def test_what_cannot_be_is_refused_by_name() -> None:
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("direct", {}, "in memory that a server's ranks share"),
        ("fullmesh_v1", {"ranks_per_server": 2}, "a server cannot have ranks of two hosts"),
    ]
    of_ranks = namespaces.run(
        rounds.refusals, (1, 2), [[scheme, fields] for scheme, fields, _ in asked], timeout_s=seconds(60)
    )
    for said in of_ranks:
        assert [text in each for each, (_, _, text) in zip(said, asked, strict=True)] == [True] * 2, said


@pytest.mark.parametrize(
    ("scheme", "victims"),
    [
        pytest.param("fullmesh_v1", [2], marks=LONG),
        pytest.param("hierarchy", [0], marks=LONG),  # with the group's store
        pytest.param("fullmesh_v1", [0, 1], marks=LONG),  # a host
        pytest.param("hierarchy", [2, 3], marks=LONG),
    ],
)
def test_who_dies_is_named(scheme: str, victims: list[int]) -> None:
    results = namespaces.run(rounds.until_some_die, (2, 2), scheme, victims, 5, timeout_s=seconds(60))
    for rank, missing in enumerate(results):
        assert missing == (None if rank in victims else victims), results


STOPPED_S = 1.5 * UNTIL_MASKED_S


@pytest.mark.parametrize(
    ("scheme", "victim", "stopped_s"),
    [
        ("fullmesh_v1", 2, None),
        pytest.param("hierarchy", 3, None, marks=LONG),
        pytest.param("fullmesh_v1", 1, STOPPED_S, marks=LONG),
    ],
)
def test_the_others_go_on_without_who_is_lost(scheme: str, victim: int, stopped_s: float | None) -> None:
    # A rank that dies is heard of at once, whatever the time-out.
    given = scheme, victim, stopped_s, seconds(60) if stopped_s is None else UNTIL_MASKED_S
    results = namespaces.run(rounds.rounds_without, (2, 2), *given, timeout_s=seconds(120))
    lost = results.pop(victim)
    assert results == [[[], [victim], ""]] * 3
    if stopped_s is None:
        assert lost is None
        return
    wrong, masked, raised = lost
    assert (wrong, masked) == ([], []), "it masks nobody for its own lateness"
    assert "is masked" in raised


@pytest.mark.long
def test_masks_are_refused_where_peers_share_an_endpoint() -> None:
    environment, given = {"MOE_TRITON_PROVIDER": "tcp;ofi_rxm"}, {"timeout_s": seconds(60)}
    for said in namespaces.run(rounds.refused_masks, (1, 2), environment=environment, **given):
        in_calls, by_hand, right = said
        assert in_calls.startswith(
            "on_lost is mask, but ranks are on several hosts, and libfabric's provider"
        )
        assert by_hand.startswith("rank is ")
        assert "'tcp;ofi_rxm' has one endpoint for all: what a masked rank of another host still" in by_hand
        assert right, "and rounds go on"


@pytest.mark.long
def test_of_hosts_that_are_cut_apart_the_one_with_the_store_goes_on() -> None:
    results = namespaces.run(rounds.rounds_cut_apart, (2, 2), "fullmesh_v1", 4.0, timeout_s=seconds(180))
    for wrong, masked, raised in results[:2]:
        assert (wrong, masked, raised) == ([], [2, 3], "")
    for wrong, masked, raised in results[2:]:
        assert wrong == []
        assert not set(masked) & {0, 1}, "they mask nobody whom they cannot ask about"
        assert "CommunicationTimeoutError" in raised


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "hosts"), [("fullmesh_v1", (2, 1)), ("hierarchy", (1, 1))])
def test_a_short_cut_goes_on(scheme: str, hosts: tuple[int, ...]) -> None:
    culprit = sum(hosts) - 1
    results = namespaces.run(rounds.rounds_over_a_cut, hosts, scheme, culprit, 3.0, timeout_s=seconds(90))
    assert results == [[]] * sum(hosts)


@pytest.mark.long
def test_a_long_cut_ends_at_the_deadline_and_spoils_nothing_later() -> None:
    results = namespaces.run(rounds.rounds_after_a_cut, (2, 1), "fullmesh_v1", 2, timeout_s=seconds(120))
    for missed, others in zip([each["missed"] for each in results], [{2}, {2}, {0, 1}], strict=True):
        assert missed
        assert others.issuperset(missed)
    assert [each["wrong"] for each in results] == [[]] * 3
