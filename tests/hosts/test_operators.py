"""torch_npu's functions on ranks that share no memory, whose servers nobody names."""

from __future__ import annotations

import base64
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.hosts import namespaces
from tests.distributed.operator_cases import OperatorCase
from tests.distributed.operator_runs import check
from tests.hosts import operators
from tests.patience import seconds

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts")
LONG = pytest.mark.long
HOSTS = 2, 2

A2: dict[str, Any] = {"given_product": "A2", "hidden": 1024}
OF_PUBLISHED_SIZES = [A2 | {"quantize": "dynamic"}]
RELAXED = [
    {"given_product": "A3", "version": 1, "shared": (1, 1)},
    {"given_product": "A3", "quantize": "dynamic", "special": "all", "norm": True},
    {"given_product": "A3", "elastic": "routed", "tokens": "variable"},
    {"given_product": "A2", "version": 1, "quantize": "dynamic", "tokens": "variable"},
    {"given_product": "A2", "special": "zero", "performance_info": True, "mask": "tokens"},
]


@cache
def found_by_ranks() -> list[Any]:
    """What each rank has found; one job does for several tests."""
    return namespaces.run(operators.everything, HOSTS, RELAXED, timeout_s=seconds(90))


def wrong_of(given: list[dict[str, Any]], results: list[list[str]]) -> list[str]:
    """What differs from the reference, of the outputs of each rank in each case."""
    wrong = []
    for number, fields in enumerate(given):
        of_case = replace(OperatorCase(**fields), servers=HOSTS)
        wrong += check(of_case, [base64.b64decode(each[number]) for each in results])
    return wrong


def test_hosts_are_the_servers() -> None:
    results = namespaces.run(operators.of_published_sizes, HOSTS, OF_PUBLISHED_SIZES, timeout_s=seconds(60))
    assert [each["wrong"] for each in results] == [[]] * 4
    assert wrong_of(OF_PUBLISHED_SIZES, [each["cases"] for each in results]) == []


@pytest.mark.long
def test_versions_and_features() -> None:
    assert wrong_of(RELAXED, [each["cases"] for each in found_by_ranks()]) == []


@pytest.mark.long
def test_hierarchy() -> None:
    assert [each["wrong"] for each in found_by_ranks()] == [[]] * 4


@pytest.mark.long
def test_a_group_knows_its_hosts_once_it_has_met_and_refuses_what_they_cannot_have() -> None:
    for known, of_servers, of_pairs in (each["first"] for each in found_by_ranks()):
        assert known == [[4], list(HOSTS)]
        assert "a server cannot have ranks of two hosts" in of_servers
        assert "group_tp is of two ranks, but tensor-parallel ranks" in of_pairs
