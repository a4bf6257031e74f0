"""Calls in rounds with one row for each token and rank, bit for bit as one large round of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_triton import DispatchOutput
from moe_triton.core.handle import PlacedHandle
from moe_triton.processes import RankGroup
from tests.distributed import long_runs
from tests.distributed.cases import Case, experts_of, inputs_of
from tests.distributed.failures import not_refused
from tests.distributed.long_runs import Options, beside
from tests.distributed.test_long_calls import case_of
from tests.distributed.test_rows_per_rank import dispatched, expected_round, mask_of, wrong_parts
from tests.distributed.workers import by_turns, make_buffer
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
SCHEMES = "fullmesh_v1", "fullmesh_v2", "fullmesh"
USUAL: Options = {}


def compare(
    rank: int,
    num_ranks: int,
    case: Case,
    options: Sequence[Options],
    dims: int,
    comm: str | None,
    settings: dict[str, Any],
) -> list[str]:
    """Runs calls by turns with each of these options, and each again by its routing; names what is wrong.

    At the end results of all calls go back once more.
    """
    wrong, done = [], []
    expected = by_turns(lambda number: expected_round(case, number, dims, 2 * bool(comm)), len(options))
    with make_buffer(case, tuning=beside(case), **settings) as buffer:
        stats = torch.zeros(buffer.num_local_experts, dtype=torch.int32)
        counted = stats.clone()
        for number, given in enumerate(options):
            own, (received, sums) = inputs_of(case, rank, number), expected[number]
            for again in (False, True):
                name = f"call {number}{' again' * again}"
                routing: Options = {"active_mask": mask_of(case, rank, number, dims), **given}
                call = own
                if again:
                    routing, call = {"handle": done[-1][0]}, replace(own, topk_idx=None)
                output = dispatched(buffer, case, call, cumulative_local_expert_recv_stats=stats, **routing)
                counted += received[rank].tokens_per_expert
                wrong += [f"{name}: {part}" for part in wrong_parts(output, received[rank])]
                in_rounds = max(case.tokens) > case.config.num_max_tokens_per_rank
                if in_rounds and not isinstance(output.handle, PlacedHandle):
                    wrong.append(f"{name}: not in rounds")
                if output.handle.tokens_per_expert_list != received[rank].tokens_per_expert.tolist():
                    wrong.append(f"{name}: tokens_per_expert_list")
                if not torch.equal(stats, counted):
                    wrong.append(f"{name}: stats")
                y = results_of(case, rank, output)
                if not torch.equal(buffer.combine(y, output.handle, comm_quantize=comm), sums[rank]):
                    wrong.append(f"{name}: combined")
                done.append((output.handle, y, sums[rank]))
        for number, (handle, y, total) in enumerate(done):
            if not torch.equal(buffer.combine(y, handle, comm_quantize=comm), total):
                wrong.append(f"result {number} later: combined")
    return wrong


def results_of(case: Case, rank: int, output: DispatchOutput) -> torch.Tensor:
    """What experts give, and NaN behind the rows that there are."""
    y, n = experts_of(case, rank, output.tokens), output.handle.num_received()
    y[n:] = float("nan")
    return y


def check(
    ranks: Groups,
    case: Case,
    *options: Options,
    dims: int = 0,
    comm: str | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    given = options or (USUAL,) * 3
    args = case, given, dims, comm, settings or {}
    results = ranks(case.config.num_ranks).run(compare, *args, timeout_s=seconds(120.0))
    assert results == [[]] * case.config.num_ranks


def wide(scheme: str, tokens: tuple[int, ...], quantize: str | None = None, **config: Any) -> Case:
    """Of experts enough that tokens have several on a rank."""
    return case_of(scheme, tokens, quantize, **{"num_topk": 4, "num_experts": 3 * len(tokens)} | config)


@pytest.mark.parametrize(
    ("scheme", "quantize"),
    [*((scheme, None) for scheme in SCHEMES), ("fullmesh_v1", "int8"), ("fullmesh", "int8")],
)
def test_ranks_with_any_number_of_rounds(ranks: Groups, scheme: str, quantize: str | None) -> None:
    """Whoever has one round, or none, hears of the others'; each call has other ranks with most."""
    check(ranks, wide(scheme, (3, 4, 13, 0), quantize))


@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_rounds_that_are_sent_ahead(ranks: Groups, scheme: str) -> None:
    case = replace(wide(scheme, (3, 4, 13, 0), "int8"), num_blocks=2)
    check(ranks, case, USUAL, {"num_max_tokens_per_rank": 13}, dims=2)


ONE_ROUND = (4, 0)
FORMS: dict[str, tuple[Case, dict[str, Any]]] = {
    "one round": (wide("fullmesh_v1", ONE_ROUND), {}),
    "one round in band, masked": (wide("fullmesh_v2", ONE_ROUND, "int8"), {"dims": 2}),
    "one round in blocks": (wide("fullmesh", ONE_ROUND), {}),
    "whole rounds and one token more": (wide("fullmesh_v1", (8, 9)), {}),
    "scales of several elements": (wide("fullmesh_v2", (9, 2), "int8_128", hidden=256), {}),
    "fp16 in blocks": (replace(wide("fullmesh", (9, 2)), dtype=torch.float16), {}),
    "no weights": (replace(wide("fullmesh_v1", (9, 2)), weights=False), {}),
    "nothing": (replace(wide("fullmesh_v2", (9, 2)), routing="none"), {}),
    "mask of tokens": (wide("fullmesh_v1", (9, 6)), {"dims": 1}),
    "mask of entries": (wide("fullmesh_v2", (9, 6)), {"dims": 2}),
    "mask in blocks": (wide("fullmesh", (9, 6), "int8"), {"dims": 2}),
    "results as int8": (wide("fullmesh_v1", (9, 2)), {"comm": "int8"}),
    "padded": (wide("fullmesh_v1", (9, 2), "int8", hidden=65), {}),
    "own numbers": (wide("fullmesh_v2", (9, 2), experts_per_rank=(4, 2)), {}),
    "a rank without experts": (wide("fullmesh_v1", (9, 2), experts_per_rank=(0, 6)), {}),
    "servers": (wide("fullmesh_v1", (9, 2, 0, 4), ranks_per_server=2), {}),
    "servers, masked": (wide("fullmesh_v1", (9, 2, 0, 4), "int8", ranks_per_server=2), {"dims": 2}),
    "zero experts": (wide("fullmesh_v1", (9, 2)), {"settings": {"num_zero_experts": 1}}),
    "in torch": (replace(wide("fullmesh_v1", (9, 6), "int8"), kernels="torch"), {"dims": 2}),
}


LONG = {"one round in blocks", "fp16 in blocks", "nothing", "mask of entries", "servers", "zero experts"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in FORMS]
)
def test_rows_and_sums_are_the_references(ranks: Groups, name: str) -> None:
    case, given = FORMS[name]
    check(ranks, case, USUAL, USUAL, **given)


AS_ASKED_FOR: dict[str, list[Options]] = {
    "promised": [{"num_max_tokens_per_rank": 13}, {"num_max_tokens_per_rank": 30}],
    "promised, exact": [{"num_max_tokens_per_rank": 16, "num_recv_tokens": "exact"}],
    "exact": [{"num_recv_tokens": "exact"}],
    "bound": [{"num_recv_tokens": "bound"}],
    "so many": [{"num_recv_tokens": 40}, {"num_recv_tokens": 40, "num_max_tokens_per_rank": 20}],
}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param(name, scheme, marks=pytest.mark.long if (n - k) % len(SCHEMES) else ())
        for n, name in enumerate(AS_ASKED_FOR)
        for k, scheme in enumerate(SCHEMES)
    ],
)
def test_outputs_as_asked_for(ranks: Groups, name: str, scheme: str) -> None:
    check(ranks, wide(scheme, (3, 4, 13, 0)), *AS_ASKED_FOR[name])
    check(ranks, wide(scheme, ONE_ROUND, "int8"), *AS_ASKED_FOR[name])


PER_RANK: Options = {"do_expand": False}
CAPACITY = PER_RANK | {"num_recv_tokens": 5}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([[CAPACITY]], ["num_recv_tokens", "rank 0 has room for 5 rows and receives 18"]),
        ([[CAPACITY | {"num_recv_tokens": 50}, CAPACITY]], ["rank 1 has room for 5 rows and receives 18"]),
        (
            [[PER_RANK | {"num_max_tokens_per_rank": 16}, PER_RANK | {"num_max_tokens_per_rank": 17}]],
            ["num_max_tokens_per_rank", "16 on rank 0, 17 on rank 1"],
        ),
    ],
    ids=["too small everywhere", "too small on one rank", "other numbers"],
)
def test_what_all_ranks_refuse_leaves_the_buffer_usable(
    ranks: Groups, options: list[list[Options]], names: list[str]
) -> None:
    calls = [*options, [PER_RANK]] * 2
    for said in ranks(2).run(long_runs.refused, wide("fullmesh_v1", (13, 5)), calls, True):
        assert [said[1], said[3]] == ["", ""]
        assert len(said) == 4, said[4:]
        for text in said[::2]:
            assert text.startswith("ArgumentError")
            assert all(name in text for name in names), text


REFUSED: list[tuple[Options, str]] = [
    ({"num_max_tokens_per_rank": 12}, "num_max_tokens_per_rank=12"),
    ({"num_recv_tokens": 0}, "num_recv_tokens"),
    ({"expert_alignment": 4}, "expert_alignment"),
    ({"layout": "padded"}, "layout"),
    ({"do_zero_padding": True}, "do_zero_padding"),
    ({"wait": False}, "wait"),
    ({"out": torch.empty(3, 65, dtype=torch.bfloat16)}, "out"),
]


def test_what_is_refused_before_anything_is_sent(ranks: Groups) -> None:
    calls = [[PER_RANK | options] for options, _ in REFUSED]
    for said in ranks(2).run(long_runs.refused, wide("fullmesh_v2", (13, 13)), calls, True):
        assert len(said) == len(REFUSED)
        for text, (_, name) in zip(said, REFUSED, strict=True):
            assert text.startswith("ArgumentError"), text
            assert name in text


def test_given_outputs_that_are_too_small_keep_nobody_else_from_theirs(ranks: Groups) -> None:
    small = PER_RANK | {"out": torch.empty(2, 64, dtype=torch.bfloat16)}
    calls: list[list[Options]] = [[small, PER_RANK, PER_RANK, PER_RANK]] * 2
    said = ranks(4).run(long_runs.refused, wide("fullmesh", (13, 2, 5, 0)), calls, True)
    assert said[1:] == [["", ""]] * 3
    assert len(said[0]) == 2
    assert all(text.startswith("ArgumentError") and "out" in text for text in said[0])


@pytest.mark.parametrize("others", [USUAL, PER_RANK | {"num_recv_tokens": "exact"}], ids=str)
def test_ranks_that_differ_are_named(ranks: Groups, others: Options) -> None:
    calls: list[list[Options]] = [[PER_RANK, others]]
    for (text,) in ranks(2).run(long_runs.refused, wide("fullmesh_v1", (9, 3)), calls, False):
        assert text.startswith("ConfigMismatchError")
        assert ("num_recv_tokens" if "num_recv_tokens" in others else "do_expand") in text


def into_given(rank: int, num_ranks: int, case: Case) -> list[str]:
    """What is otherwise than the reference's in outputs that are given, and in those by a known routing."""
    wrong, own = [], inputs_of(case, rank, 0)
    received, sums = expected_round(case, 0)
    with make_buffer(case) as buffer:
        exact: Options = {"num_recv_tokens": "exact"}
        first = dispatched(buffer, case, own, **exact)
        output = dispatched(buffer, case, own, out=first, **exact)
        wrong += [f"earlier output: {name}" for name in wrong_parts(output, received[rank])]
        handle = output.handle
        again = dispatched(buffer, case, replace(own, topk_idx=None), out=output, handle=handle)
        wrong += [f"known routing: {name}" for name in wrong_parts(again, received[rank])]
        longer = torch.empty(len(first.tokens) + 3, *first.tokens.shape[1:], dtype=first.tokens.dtype)
        output = dispatched(buffer, case, own, out=longer, **exact)
        wrong += [f"longer tensor: {name}" for name in wrong_parts(output, received[rank])]
        wrong += ["it is elsewhere"] if output.tokens.data_ptr() != longer.data_ptr() else []
        out = torch.empty(len(own.x) + 1, case.config.hidden, dtype=case.dtype)
        combined = buffer.combine(results_of(case, rank, output), output.handle, out=out)
        return wrong if torch.equal(combined, sums[rank]) else [*wrong, "combined"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_that_are_given(ranks: Groups, scheme: str) -> None:
    case = wide(scheme, (9, 2), "int8" if scheme == "fullmesh" else None)
    assert ranks(2).run(into_given, case) == [[], []]


def bad_handles(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Wrong messages of calls by handles that are not as they have to be, in a buffer that goes on."""
    own, (received, sums) = inputs_of(case, rank, 0), expected_round(case, 0)
    with make_buffer(case) as buffer:
        output = dispatched(buffer, case, own)
        y, good = results_of(case, rank, output), output.handle
        expanded = buffer.dispatch(own.x, own.topk_idx).handle
        assert isinstance(good, PlacedHandle)
        last = good.rounds[-1]._replace(topk_idx=good.results_idx.float())
        cut = PlacedHandle(**{**good._state(), "rounds": (*good.rounds[:-1], last)})
        bad = PlacedHandle(**{**good._state(), "results_idx": good.results_idx[1:]})

        def again(handle: Any, **options: Any) -> Callable[[], object]:
            return lambda: buffer.dispatch(own.x, handle=handle, **options)

        wrong = not_refused(
            [
                ("handle is of a dispatch with do_expand=True", again(expanded, do_expand=False)),
                ("handle.rounds[", again(cut)),
                ("handle.results_idx is", again(bad)),
                ("handle.rounds[", lambda: buffer.combine(y, cut)),
                ("topk_weights is given", lambda: buffer.combine(y, good, own.topk_weights)),
                ("y is of", lambda: buffer.combine(y[: good.num_received() - 1], good)),
                ("num_recv_tokens is", again(good, num_recv_tokens="exact")),
            ]
        )
        output = buffer.dispatch(own.x, None, own.topk_weights, handle=good, do_expand=False)
        wrong += wrong_parts(output, received[rank])
        is_summed = torch.equal(buffer.combine(y, output.handle), sums[rank])
        return wrong if is_summed else [*wrong, "combined"]


def test_handles_that_are_not_as_dispatch_made_them_are_refused(ranks: Groups) -> None:
    assert ranks(2).run(bad_handles, wide("fullmesh_v1", (9, 6))) == [[], []]


@pytest.mark.parametrize(
    "tokens",
    [(1, 511), (513, 511), *(pytest.param(t, marks=pytest.mark.long) for t in ((4096, 1), (16384, 512)))],
    ids=str,
)
def test_numbers_of_tokens_that_are_served(ranks: Groups, tokens: tuple[int, ...]) -> None:
    case = wide("fullmesh_v1", tokens, hidden=32)
    check(ranks, replace(case, config=replace(case.config, num_max_tokens_per_rank=512)), USUAL)


def in_halves(rank: int, num_ranks: int, case: Case) -> list[str]:
    """What is otherwise than the reference's where who has one round sends it and waits later."""
    wrong = []
    with make_buffer(case) as buffer:
        for number in range(3):
            own, (received, sums) = inputs_of(case, rank, number), expected_round(case, number)
            few = len(own.x) <= case.config.num_max_tokens_per_rank
            output = dispatched(buffer, case, own, wait=not few)
            wrong += [f"call {number}: {name}" for name in wrong_parts(output, received[rank])]
            y = results_of(case, rank, output)
            if not torch.equal(buffer.combine(y, output.handle), sums[rank]):
                wrong.append(f"call {number}: combined")
    return wrong


def test_one_round_is_sent_before_it_is_known_that_there_are_more(ranks: Groups) -> None:
    assert ranks(2).run(in_halves, wide("fullmesh_v2", (9, 2))) == [[], []]


@st.composite
def long_cases(draw: st.DrawFn) -> tuple[Case, list[Options], dict[str, Any]]:
    scheme = draw(st.sampled_from(SCHEMES))
    tokens = tuple(draw(st.lists(st.integers(0, 14), min_size=2, max_size=2)))
    quantize, sizes = draw(st.sampled_from([None, "int8"])), {"num_topk": draw(st.integers(1, 6))}
    case = replace(
        wide(scheme, tokens, quantize, **sizes),
        seed=draw(st.integers(0, 999)),
        routing=draw(st.sampled_from(["uniform", "skewed", "sparse", "none"])),
        num_blocks=draw(st.sampled_from([None, 1, 2, 3])),
        weights=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
    )
    option = st.sampled_from(
        [
            USUAL,
            {"num_max_tokens_per_rank": 14},
            {"num_recv_tokens": "exact"},
            {"num_recv_tokens": 28, "num_max_tokens_per_rank": 15},
        ]
    )
    is_quantized = scheme != "fullmesh" and draw(st.booleans())
    given_ = {"dims": draw(st.sampled_from([0, 0, 1, 2])), "comm": "int8" if is_quantized else None}
    return case, draw(st.lists(option, min_size=1, max_size=4)), given_


@pytest.mark.long
@given(long_cases())
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_case(ranks: Groups, drawn: tuple[Case, list[Options], dict[str, Any]]) -> None:
    case, options, given_ = drawn
    check(ranks, case, *options, **given_)
