"""Each check sees what it is there for: a wrong bit or number, rows too early, an error that never comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from moe_triton.core.errors import CommunicationTimeoutError
from moe_triton.tools.selftest.check import Check, Finding, Result, Settings
from moe_triton.tools.selftest.checks import operators
from moe_triton.tools.selftest.checks.operators import operator_checks, plain_case
from moe_triton.tools.selftest.checks.stragglers import _miss, judge_waits
from moe_triton.tools.selftest.run import Battery
from tests.patience import seconds
from tests.selftest import wrong

SETTINGS = Settings(quick=True, timeout_s=seconds(60.0))
CASE = plain_case(SETTINGS, 2)
QUANTIZED = next(c.arguments[0] for c in operator_checks(SETTINGS, 2) if c.name == "fullmesh_v1: int8")

POSTED = {
    scheme: next(c.arguments[0] for c in operator_checks(SETTINGS, 2) if c.name == f"{scheme}, posted: bf16")
    for scheme in ("fullmesh", "hierarchy")
}


@pytest.fixture(scope="module")
def battery() -> Iterator[Battery]:
    with Battery(SETTINGS) as started:
        yield started


def run(battery: Battery, function: Callable[..., Finding], *arguments: object, **options: object) -> Result:
    name = function.__name__
    battery.run([Check(name, "environment", function, arguments, ranks=2, **options)])  # type: ignore[arg-type]
    return battery.results[-1]


def test_a_wrong_bit_of_a_sum_is_told_with_round_and_rank(battery: Battery) -> None:
    result = run(battery, wrong.wrong_combine, CASE)
    (detail,) = result.details
    last = 16 * 512 - 1
    assert detail.startswith(f"rank 1: round 1: combined differs in 1 of 8192 elements, first in {last}: ")


def test_a_wrong_bit_of_a_scale_is_told_on_every_rank(battery: Battery) -> None:
    result = run(battery, wrong.wrong_dispatch, QUANTIZED)
    assert [detail.split(" differs in 1 of")[0] for detail in result.details] == [
        f"rank {rank}: round {number}: scales" for rank in (0, 1) for number in range(3)
    ]


def test_posts_are_compared_too_or_skipped_with_the_reason(battery: Battery) -> None:
    for case in POSTED.values():
        assert run(battery, operators.compare_posted, case).status == "passed"
    result = run(battery, wrong.without_posts, POSTED["fullmesh"])
    assert (result.status, result.details) == ("skipped", ("several servers: there is no network",))


def test_a_wrong_bit_behind_a_late_rank_is_told(battery: Battery) -> None:
    result = run(battery, wrong.wrong_late_combine, 20, merge=judge_waits)
    assert [d.split(" differs")[0] for d in result.details] == [
        f"rank 0: rank {n} late: combined" for n in (0, 1)
    ]


def test_rows_that_nobody_can_have_sent_yet_are_told(battery: Battery) -> None:
    result = run(battery, wrong.early_rows, 300, merge=judge_waits)
    assert [d.split(" ms before ")[1] for d in result.details] == ["rank 0 sent any", "rank 1 sent any"]


def test_a_wrong_bit_by_torch_npus_names_is_told(battery: Battery) -> None:
    result = run(battery, wrong.wrong_names, 2)
    assert [d.split(" differs in 1 of")[0] for d in result.details] == ["rank 0: combined"]


def test_a_wrong_bit_in_a_window_is_told_with_its_source(battery: Battery) -> None:
    result = run(battery, wrong.wrong_rows)
    assert result.details == ("rank 1: 1 of 64 rows from rank 0 differ, first row 63",)


def test_a_wrong_number_of_a_flag_is_told_by_everybody(battery: Battery) -> None:
    result = run(battery, wrong.wrong_numbers)
    assert result.details == tuple(
        f"rank {rank}: round 2: the ranks' numbers came as [2000, 2002]" for rank in (0, 1)
    )


def test_a_rank_that_nobody_misses_is_told(battery: Battery) -> None:
    result = run(battery, wrong.everybody_comes)
    assert result.details == ("rank 0: nobody missed rank 1",)


def test_an_error_that_names_another_rank_is_told() -> None:
    def miss() -> None:
        raise CommunicationTimeoutError("dispatch", 1, 1, [0, 2], "no flags")

    (said,) = _miss(miss, 2)
    assert said.startswith("ranks [0, 2] were missed instead of 2")

    def miss_the_right_one() -> None:
        raise CommunicationTimeoutError("dispatch", 1, 1, [2], "no flags")

    assert _miss(miss_the_right_one, 2) == ()
