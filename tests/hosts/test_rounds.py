"""Rounds of ranks that share no memory."""

from __future__ import annotations

import pytest

from tests.hosts import namespaces, rounds
from tests.patience import seconds

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts")
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("scheme", "row_format", "hosts"),
    [
        ("fullmesh_v1", "", (2, 1)),
        ("hierarchy", "int8", (2, 2)),
        pytest.param("fullmesh", "int8", (2, 2), marks=LONG),
        pytest.param("fullmesh", "", (1, 2), marks=LONG),
        pytest.param("fullmesh_v1", "int8", (1, 1, 1), marks=LONG),
        pytest.param("hierarchy", "", (1, 1, 1), marks=LONG),
    ],
)
def test_rounds(scheme: str, row_format: str, hosts: tuple[int, ...]) -> None:
    results = namespaces.run(rounds.rounds, hosts, scheme, row_format, timeout_s=seconds(60))
    host_of = [f"host{number}" for number, ranks in enumerate(hosts) for _ in range(ranks)]
    assert [each["wrong"] for each in results] == [[]] * sum(hosts)
    assert [each["host"] for each in results] == host_of
    assert all(each["sizes"] == list(hosts) and each["posted"] > 0 for each in results)


def test_what_cannot_be_is_refused_by_name() -> None:
    for scheme, fields, text in (
        ("direct", {}, "in memory that a server's ranks share"),
        ("fullmesh_v1", {"ranks_per_server": 2}, "a server cannot have ranks of two hosts"),
    ):
        said = namespaces.run(rounds.refusals, (1, 2), scheme, fields, timeout_s=seconds(60))
        assert all(text in each for each in said), said


@pytest.mark.parametrize(("scheme", "victim"), [("fullmesh_v1", 2), pytest.param("hierarchy", 0, marks=LONG)])
def test_who_dies_is_named(scheme: str, victim: int) -> None:
    results = namespaces.run(rounds.until_one_dies, (2, 2), scheme, victim, 5, timeout_s=seconds(60))
    assert results.pop(victim) is None
    assert [each[0] for each in results] == [[victim]] * 3, results
