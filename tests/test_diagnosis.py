"""What is said of failed runs is made from memory that peers write: whatever it holds, an error comes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends import CAPABILITIES
from moe_triton.backends.phases import first_code
from moe_triton.core.ascendc import (
    DISPATCH_WAIT,
    POST_STATUS,
    REPORT_BAD_ROW,
    REPORT_MISMATCH,
    REPORT_STRAY,
    REPORT_TIMEOUT,
    REPORT_WORDS,
)
from moe_triton.core.config import Config, Product
from moe_triton.core.errors import BufferStateError, CommunicationTimeoutError, ConfigMismatchError
from moe_triton.core.plan import Launch
from moe_triton.core.records import LOST_COUNT, RAIL_END
from moe_triton.core.row_formats import AS_THEY_ARE
from moe_triton.layout import CALL_WORD, NUM_ZONES
from moe_triton.layout.call_word import Kind, call_word
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.rendezvous.notes import Culprits
from moe_triton.runtime.diagnosis import FLAG_BITS, Run, failure
from moe_triton.schemes import make_scheme, product_of
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_WAIT
from moe_triton.schemes.a2_fullmesh.layout import BlocksLayout
from moe_triton.schemes.common.waits import TimedOut
from moe_triton.schemes.fullmesh.ascendc import COMBINE_POST, COMBINE_WAIT, DISPATCH_POST
from moe_triton.schemes.hierarchy.ascendc import PARTIALS_SEND, RAIL_RELAY, RAIL_SEND, RAIL_WAIT, RETURNS_LOST
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.rank_context import RankContext

RANKS, TOKENS, TOPK = 4, 3, 2
WITH_WORDS = DISPATCH_WAIT, BLOCKS_WAIT, RAIL_RELAY, RAIL_WAIT
BF16 = torch.bfloat16
DISPATCH = DispatchVariant(BF16, row_format=AS_THEY_ARE, smooth=False, weights=False)
COMBINE = CombineVariant(BF16, weights=False)
USUAL = call_word("dispatch", DISPATCH.kind)


def context_of(
    scheme: str,
    version: int = 2,
    exchange: int | None = None,
    servers: tuple[int, ...] | None = None,
    product: Product | None = None,
) -> RankContext:
    sizes = RANKS, TOKENS, 64, TOPK, 8
    product = product or product_of(scheme)
    config = Config(
        *sizes, product=product, scheme=scheme, version=version, relaxed=True, ranks_per_server=servers
    )
    return make_scheme(
        RankContext(config, 1, 2, 5_000_000, CAPABILITIES["cpu"], exchange_rank=exchange)
    ).context


def waits_of(context: RankContext) -> list[tuple[str, int, Launch]]:
    """Operator, zone and launch of every wait for flags."""
    scheme = make_scheme(context)
    exchange = context.exchange_rank is not None
    weights = context.config.scheme == "hierarchy"
    dispatch = DispatchVariant(BF16, AS_THEY_ARE, weights=weights, exchange=exchange)
    combine = CombineVariant(BF16, weights=False, exchange=exchange)
    plans = [plan for zone in range(NUM_ZONES) for plan in (
        scheme.whole(dispatch, zone), scheme.whole(combine, zone), scheme.barrier(zone)
    )]  # fmt: skip
    return [
        (plan.operator, plan.zone, launch)
        for plan in plans
        for launch in plan.launches
        if launch.kernel in (*WITH_WORDS, COMBINE_WAIT) or _posts(launch)
    ]


def _posts(launch: Launch) -> bool:
    values = {arg.name: value for arg, value in zip(launch.kernel.args, launch.values, strict=True)}
    posting = DISPATCH_POST, COMBINE_POST, POST_STATUS, RAIL_SEND, RETURNS_LOST, PARTIALS_SEND
    return launch.kernel in posting and values["out_offset"] != 0 and values.get("num_servers") != 1


SITES = [
    context_of("fullmesh_v1"),
    context_of("fullmesh_v2"),
    context_of("direct"),
    context_of("fullmesh_v1", 1),
    context_of("fullmesh_v1", exchange=0),
    context_of("fullmesh"),
    context_of("fullmesh_v1", servers=(2, 2)),
    context_of("fullmesh_v1", 1, servers=(3, 1)),
    context_of("hierarchy", product="A3"),
    context_of("hierarchy", servers=(2, 2)),
]


def memory_of(context: RankContext) -> dict[str, torch.Tensor | int]:
    """What waits' plans hold, of zeros."""
    names = ("recv_counts", "barrier_counts", "reduced_counts", "round_numbers", "rail_seen")
    scratch = make_scheme(context).scratch()
    held = (name for name in names if name in scratch)
    counts = {name: torch.zeros(scratch[name].elements, dtype=torch.int32) for name in held}
    memory: dict[str, torch.Tensor | int] = {
        **counts,
        "window": torch.zeros(context.layout.window_bytes, dtype=torch.uint8),
        "exchange_counts": torch.zeros(2, dtype=torch.int32),
        "topk_idx": torch.arange(TOKENS * TOPK, dtype=torch.int32).view(TOKENS, TOPK),
        "num_tokens": TOKENS,
        "tables": torch.zeros(RelayTables(context.config).num_words, dtype=torch.int32),
    }
    if context.exchange_rank is not None:
        memory["exchange_window"] = torch.zeros(context.exchange.window_bytes, dtype=torch.uint8)
    return memory


def report_of(code: int, zone: int, first: int = 0, expected: int = 0, found: int = 0) -> torch.Tensor:
    report = torch.zeros(2, REPORT_WORDS, dtype=torch.int32)
    report[1, :6] = torch.tensor([code, first, 1, zone, expected, found])
    return report


words = st.integers(-(2**31), 2**31 - 1)


@pytest.mark.parametrize("number", range(len(SITES)))
@settings(max_examples=15)
@given(seed=st.integers(0, 2**20), expected=words, found=words, share=st.sampled_from([0.0, 0.5, 1.0]))
def test_any_memory_gives_an_error_of_ours(
    number: int, seed: int, expected: int, found: int, share: float
) -> None:
    context = SITES[number]
    generator = torch.Generator().manual_seed(seed)
    memory = memory_of(context)
    for held in memory.values():
        if isinstance(held, torch.Tensor) and held.dtype == torch.uint8:
            rubbish = torch.randint(-(2**31), 2**31, (len(held) // 4,), generator=generator)
            flags = torch.rand(len(rubbish), generator=generator) < share
            held.view(torch.int32).copy_(torch.where(flags, FLAG_BITS, rubbish))
        elif isinstance(held, torch.Tensor):
            held.copy_(torch.randint(-2, 3, held.shape, generator=generator))
    memory["topk_idx"] = memory_of(context)["topk_idx"]  # this rank's own
    for operator, zone, launch in waits_of(context):
        call = Run(operator, 7, memory)
        codes = [REPORT_TIMEOUT] + [REPORT_MISMATCH] * (launch.kernel in WITH_WORDS)
        for code in codes:
            report = report_of(code, zone, seed % 3, expected, found)
            _, error = failure(context, call, launch, code, report, {}, ())
            kind = CommunicationTimeoutError if code == REPORT_TIMEOUT else ConfigMismatchError
            assert isinstance(error, kind)
            assert f"{operator} number 7" in str(error)


def post(
    context: RankContext, name: str, zone: int, rank: int, word: int, memory: dict[str, torch.Tensor | int]
) -> None:
    window = memory["window"]
    assert isinstance(window, torch.Tensor)
    at = context.layout.region(name).offset(zone=zone, source=rank) // 4
    window.view(torch.int32)[at] = FLAG_BITS
    window.view(torch.int32)[at + CALL_WORD] = word


def wait_of(context: RankContext, operator: str) -> Launch:
    """The first one of an operator, for flags."""
    found = (launch for of, zone, launch in waits_of(context) if of == operator and zone == 0)
    return next(launch for launch in found if not _posts(launch))


@pytest.mark.parametrize("servers", [None, (2, 2)])
@pytest.mark.parametrize("count", [-1, 2**31 - 1])
def test_counts_of_a_peer_that_cannot_be_are_said(servers: tuple[int, ...] | None, count: int) -> None:
    context = context_of("fullmesh", servers=servers)
    rules = {
        "dispatch": (f"{[count, 2]} rows: each must be 0 to 3, all together at most 6", 2),
        "combine": (f"{[count]} rows: it must be the number of rows that this rank's ids ask for", 1),
    }
    for operator, (said, number) in rules.items():
        memory = memory_of(context)
        window, launch = memory["window"], wait_of(context, operator)
        assert isinstance(window, torch.Tensor)
        at = BlocksLayout(context.config).blocks.offset(zone=0, rank=3)
        window[at : at + 4 * number].view(torch.int32)[:] = torch.tensor([count, 2][:number])
        report = report_of(REPORT_BAD_ROW, 0, 3)
        why, error = failure(context, Run(operator, 5, memory), launch, REPORT_BAD_ROW, report, {}, ())
        assert isinstance(error, BufferStateError)
        assert why == (
            f"{operator} number 5 met a block of rank 3 whose header counts {said}; nothing was read there"
        )
        assert str(error) == f"{why}. Rebuild the buffer on every rank."


def test_rows_that_name_no_place_are_said() -> None:
    context = SITES[0]
    (launch,) = [each for of, zone, each in waits_of(context) if of == "combine" and zone == 0]
    report = report_of(REPORT_BAD_ROW, 0, 3)
    _, error = failure(context, Run("combine", 5, memory_of(context)), launch, REPORT_BAD_ROW, report, {}, ())
    assert str(error) == (
        "combine number 5 met a row that names no place in this group; it was not sent. "
        "Rebuild the buffer on every rank."
    )


def test_cleared_entries_were_this_ranks_own_kind() -> None:
    """A block that met no other word has cleared what it saw."""
    context, other = SITES[0], call_word("dispatch", Kind("int8"))
    memory = memory_of(context)
    post(context, "dispatch_status", 0, 3, other, memory)
    report = report_of(REPORT_MISMATCH, 0, 3, USUAL, other)
    call = Run("dispatch", 5, memory)
    why, error = failure(context, call, wait_of(context, "dispatch"), REPORT_MISMATCH, report, {}, ())
    assert why == "dispatch number 5: ranks made different calls"
    assert "  row format: bf16 on rank(s) [0, 1, 2], int8 on rank(s) [3]\n" in str(error)


def missing(memory: dict[str, torch.Tensor | int], ranks: list[int]) -> None:
    for name in ("recv_counts", "barrier_counts"):
        counts = memory[name]
        assert isinstance(counts, torch.Tensor)
        counts.view(-1, RANKS)[:, ranks] = -1


def timed_out(memory: dict[str, torch.Tensor | int], in_flight: tuple[str, ...] = ()) -> str:
    context, call = SITES[0], Run("dispatch", 5, memory)
    report = report_of(REPORT_TIMEOUT, 0)
    return str(failure(context, call, wait_of(context, "dispatch"), REPORT_TIMEOUT, report, {}, in_flight)[1])


def test_only_missing_ranks_have_posted_something_instead() -> None:
    memory = memory_of(SITES[0])
    missing(memory, [2])
    post(SITES[0], "barrier_status", 0, 2, call_word("barrier"), memory)
    post(SITES[0], "barrier_status", 1, 3, call_word("barrier"), memory)
    assert "Instead, rank(s) [2] posted flags of a barrier: every rank" in timed_out(memory)


def test_flags_of_what_is_in_flight_are_where_they_belong() -> None:
    memory = memory_of(SITES[0])
    missing(memory, [2])
    window = memory["window"]
    assert isinstance(window, torch.Tensor)
    at = SITES[0].layout.region("combine_status").offset(zone=1, token=1, k=1) // 4
    window.view(torch.int32)[at : at + 8] = FLAG_BITS
    assert "Instead" not in timed_out(memory)  # of no round
    window.view(torch.int32)[at : at + 8] = 1
    assert "Instead, rank(s) [2] posted flags of a combine" in timed_out(memory)
    assert "Instead" not in timed_out(memory, ("combine",))
    missing(memory, [0, 2, 3])
    assert "Instead, one of ranks [0, 2, 3] posted flags of a combine" in timed_out(memory)
    del memory["round_numbers"]  # as before the first combine
    assert "Instead, one of ranks [0, 2, 3] posted flags of a combine" in timed_out(memory)


def test_results_that_nobody_asked_for_are_said() -> None:
    context = SITES[0]
    report = report_of(REPORT_STRAY, 1, 3)
    call, wait = Run("combine", 5, memory_of(context)), wait_of(context, "combine")
    why, error = failure(context, call, wait, REPORT_STRAY, report, {}, ())
    said = (
        "met 1 result(s) that its ids and mask do not ask for, the first of token 3: they are not those that"
    )
    assert why == f"combine number 5 {said} its dispatch had"
    assert isinstance(error, BufferStateError)


def test_who_was_late_has_posted_nothing_instead() -> None:
    memory = memory_of(SITES[0])
    missing(memory, [2])
    post(SITES[0], "barrier_status", 0, 2, call_word("barrier"), memory)
    post(SITES[0], "dispatch_status", 0, 2, USUAL, memory)
    assert "Instead" not in timed_out(memory)


@pytest.mark.parametrize("number", range(len(SITES)))
def test_who_cannot_be_posted_to_is_named(number: int) -> None:
    context = SITES[number]
    posts = [(of, zone, launch) for of, zone, launch in waits_of(context) if _posts(launch)]
    operators = {"dispatch", "combine", "barrier"} if context.config.topology.num_servers > 1 else set()
    assert {of for of, _, _ in posts} == operators
    for operator, zone, launch in posts:
        report = report_of(REPORT_TIMEOUT, zone, 3)
        why, error = failure(
            context, Run(operator, 5, memory_of(context)), launch, REPORT_TIMEOUT, report, {}, ()
        )
        assert isinstance(error, CommunicationTimeoutError)
        assert error.missing_ranks == (3,)
        assert why.startswith(f"{operator} number 5 timed out waiting for")
        assert "the queues to them stayed full for 5 s." in str(error)


def test_calls_that_differ_come_first() -> None:
    report = torch.zeros(2, 3, REPORT_WORDS, dtype=torch.int32)
    report[0, 1, 0], report[1, 2, 0] = REPORT_TIMEOUT, REPORT_MISMATCH
    assert first_code(report) == (REPORT_MISMATCH, 1)
    report[1] = 0
    assert first_code(report) == (REPORT_TIMEOUT, 0)


@pytest.mark.parametrize(
    ("servers", "ranks", "said"),
    [
        ((2, 2), [2, 3], "server 1 (ranks 2 to 3)"),
        ((3, 1), [3], "server 1 (rank 3)"),
        ((2, 2), [3], "rank(s) [3] of server 1 (ranks 2 to 3)"),
        ((2, 2), [0, 2, 3], "rank(s) [0] of server 0 (ranks 0 to 1) and server 1 (ranks 2 to 3)"),
        ((2, 1, 1), [2, 3], "server 1 (rank 2) and server 2 (rank 3)"),
        (None, [2, 3], "rank(s) [2, 3]"),
    ],
)
def test_a_server_that_is_gone_is_named(servers: tuple[int, ...] | None, ranks: list[int], said: str) -> None:
    context = context_of("fullmesh_v1", servers=servers)
    memory = memory_of(context)
    missing(memory, ranks)
    report, call = report_of(REPORT_TIMEOUT, 0), Run("dispatch", 5, memory)
    why, error = failure(context, call, wait_of(context, "dispatch"), REPORT_TIMEOUT, report, {}, ())
    assert why == f"dispatch number 5 timed out waiting for {said}"
    assert str(error).startswith(f"dispatch number 5 (zone 0) timed out waiting for {said}: their flags")
    assert isinstance(error, CommunicationTimeoutError)
    assert error.missing_ranks == tuple(ranks)


def test_the_server_of_ranks_that_hold_up_others_is_named() -> None:
    """Rank 3 did not come because it waits for rank 0."""
    context = context_of("fullmesh_v1", servers=(1, 2, 1))
    memory = memory_of(context)
    missing(memory, [3])
    report, call = report_of(REPORT_TIMEOUT, 0), Run("dispatch", 5, memory)
    wait = wait_of(context, "dispatch")
    stuck = "rank 3 waited itself for rank(s) [0] in combine number 4. "
    found = Culprits((0,), (0,), "nobody knows", stuck)
    asked: list[object] = []

    def culprits(*given: object) -> Culprits:
        asked.append(given)
        return found

    _, error = failure(context, call, wait, REPORT_TIMEOUT, report, {}, (), culprits)
    assert asked == [("dispatch number 5", [3])]
    assert isinstance(error, CommunicationTimeoutError)
    assert (error.missing_ranks, error.uncertain_ranks, error.uncertainty) == ((0,), (0,), "nobody knows")
    assert "timed out waiting for server 0 (rank 0): their flags" in str(error)
    assert stuck in str(error)


def hierarchy_says(
    operator: str, step: str, code: int, memory: dict[str, torch.Tensor | int], first: int = 0
) -> str:
    """On rank 1 of two servers with two ranks each."""
    context = SITES[-1]
    launch = next(
        each for of, zone, each in waits_of(context) if (of, zone, each.step) == (operator, 0, step)
    )
    report = report_of(code, 0, first, USUAL, call_word("dispatch", Kind("int8")))
    _, error = failure(context, Run(operator, 5, memory), launch, code, report, {}, ())
    assert isinstance(error, CommunicationTimeoutError | ConfigMismatchError | BufferStateError)
    return str(error)


def of_hierarchy() -> tuple[dict[str, torch.Tensor | int], dict[str, torch.Tensor]]:
    """Memory of its plans, and the tensors in it."""
    memory = memory_of(SITES[-1])
    return memory, {name: held for name, held in memory.items() if isinstance(held, torch.Tensor)}


def test_a_relay_names_the_rank_that_it_waits_for() -> None:
    memory, held = of_hierarchy()
    RelayTables(SITES[-1].config).of(held["tables"], "rail_counts")[1] = -1
    assert "timed out waiting for rank(s) [3]" in hierarchy_says("dispatch", "relay", REPORT_TIMEOUT, memory)
    said = hierarchy_says("dispatch", "relay", REPORT_BAD_ROW, memory, 3)
    assert "names no place in this group, from rank(s) [3]" in said
    said = hierarchy_says("dispatch", "relay", REPORT_MISMATCH, memory, 3)
    assert "row format: bf16 on rank(s) [1], int8 on rank(s) [3]" in said


def test_who_is_lost_is_named_as_the_relay_says() -> None:
    memory, held = of_hierarchy()
    counts = held["recv_counts"].view(-1, RANKS)
    counts[:, 2] = LOST_COUNT
    assert "waiting for rank(s) [2]" in hierarchy_says("dispatch", "wait", REPORT_TIMEOUT, memory)
    counts[:] = -1
    counts[:, [1, 3]] = 0
    assert "waiting for rank(s) [0]" in hierarchy_says("dispatch", "wait", REPORT_TIMEOUT, memory)
    held["barrier_counts"].view(-1)[[0, RANKS - 1]] = -1  # the second one is of a barrier
    said = hierarchy_says("combine", "wait for returned", REPORT_TIMEOUT, memory)
    assert "waiting for rank(s) [0]" in said
    held["barrier_counts"].view(-1)[:] = torch.tensor([0, 0, 0, -1])
    assert "waiting for rank(s) [3]" in hierarchy_says("barrier", "wait", REPORT_TIMEOUT, memory)


def test_errors_say_how_long_each_wait_of_a_hierarchy_was() -> None:
    """A relay's is shorter than the time-out of 5 s, and who hears of it from the relay says that instead."""
    memory, held = of_hierarchy()
    RelayTables(SITES[-1].config).of(held["tables"], "rail_counts")[1] = -1
    held["barrier_counts"][0] = -1
    for operator, step in (("dispatch", "relay"), ("combine", "wait for returned")):
        assert "did not come within 4 s." in hierarchy_says(operator, step, REPORT_TIMEOUT, memory)
    held["rail_seen"][1] = -1
    assert "did not come within 5 s." in hierarchy_says("combine", "wait", REPORT_TIMEOUT, memory)
    held["rail_seen"][1] = -2 - 2
    said = hierarchy_says("combine", "wait", REPORT_TIMEOUT, memory)
    assert "rank 3, which relays for rank(s) [2], got nothing more of them. Rebuild" in said
    assert "within" not in said
    counts = held["recv_counts"].view(-1, RANKS)
    counts[:, 2] = LOST_COUNT
    said = hierarchy_says("dispatch", "wait", REPORT_TIMEOUT, memory)
    assert "rank 0, which relays for rank(s) [2], got nothing more of them. Rebuild" in said
    counts[:, 3] = -1
    said = hierarchy_says("dispatch", "wait", REPORT_TIMEOUT, memory)
    assert "timed out waiting for rank(s) [1] of" in said
    assert "got nothing more of them; of others their flags did not come within 5 s." in said


def test_no_wait_of_a_hierarchy_is_longer_than_the_time_out() -> None:
    """Those of relays end before, so that their peers hear of it."""
    context = SITES[-1]
    waits: dict[tuple[str, str], int] = {}
    for operator, _, launch in waits_of(context):
        if launch.kernel in WITH_WORDS:
            waits[operator, launch.step] = TimedOut(context, launch, 0, {}, torch.zeros(0)).timeout_us
    relays = {("dispatch", "relay"), ("combine", "wait for returned")}
    assert relays < set(waits)
    for step, timeout_us in waits.items():
        assert timeout_us < context.timeout_us if step in relays else timeout_us == context.timeout_us, step


def test_a_rank_that_made_another_call_is_named_as_an_end_flag_says() -> None:
    memory, held = of_hierarchy()
    flags = SITES[-1].layout.region("partial_flags")
    other = call_word("dispatch", Kind("int8"))
    end = held["window"][flags.offset(zone=0, server=1) :].view(torch.int32)
    for word, value in {"number": 1, "call": USUAL, "lost": 1 + 2, "lost_call": other}.items():
        end[RAIL_END.word(word)] = value
    said = hierarchy_says("combine", "wait", REPORT_MISMATCH, memory, 2)
    assert "row format: bf16 on rank(s) [1, 3], int8 on rank(s) [2]" in said
    for nobody in (0, 1, 5, -7):
        end[RAIL_END.word("lost")] = nobody
        assert "int8 on rank(s) [2]" in hierarchy_says("combine", "wait", REPORT_MISMATCH, memory, 2)


def test_counts_of_a_relay_that_cannot_be_are_said() -> None:
    memory, held = of_hierarchy()
    held["recv_counts"].view(-1, RANKS)[1, 2] = 1000
    said = hierarchy_says("dispatch", "wait", REPORT_BAD_ROW, memory, 1 * RANKS + 2)
    start = (
        "dispatch number 5 met a count of 1000 rows of rank 2, which rank 0 passes on here: it must be 0 to 3"
    )
    assert said.startswith(f"{start};")
    held["barrier_counts"].view(-1)[1] = -5
    said = hierarchy_says("combine", "wait for returned", REPORT_BAD_ROW, memory, 1)
    assert said.startswith("combine number 5 met a flag of rank 1 that counts -5 rows: it must be 0.")


@pytest.mark.parametrize(("seen", "rank"), [(-1, 3), (-2 - 2, 2)])
def test_who_is_lost_is_named_as_its_end_flag_says(seen: int, rank: int) -> None:
    memory, held = of_hierarchy()
    held["rail_seen"][1] = seen
    assert f"waiting for rank(s) [{rank}]" in hierarchy_says("combine", "wait", REPORT_TIMEOUT, memory)
