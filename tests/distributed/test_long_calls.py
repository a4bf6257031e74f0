"""Calls in rounds and outputs with places, bit for bit as one large round of the reference model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_triton import ArgumentError, BufferStateError, CommunicationTimeoutError, EPBuffer
from moe_triton.core.config import Config, Product
from moe_triton.core.errors import MoeTritonError
from moe_triton.processes import RankGroup
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.turns import PhaseRun
from moe_triton.schemes import product_of
from tests.distributed import long_runs
from tests.distributed.cases import Case
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
SCHEMES = "fullmesh_v1", "fullmesh_v2", "fullmesh", "hierarchy"
ROUND = 4
"""Tokens of a round."""
USUAL: long_runs.Options = {}


def pairs(values: Sequence[Any]) -> list[Any]:
    """Of each value and scheme; each value and each scheme in one that is not long, at least."""
    return [
        pytest.param(
            value,
            scheme,
            marks=() if (n - k) % len(SCHEMES) == 0 else pytest.mark.long,
            id=f"{value}-{scheme}",
        )
        for n, value in enumerate(values)
        for k, scheme in enumerate(SCHEMES)
    ]


def case_of(scheme: str, tokens: tuple[int, ...], quantize: str | None = None, **config: Any) -> Case:
    sizes: dict[str, Any] = {"hidden": 64, "num_topk": 2, "num_experts": 2 * len(tokens)} | config
    product = sizes.pop("product", product_of(scheme))
    if product_of(scheme) == "A2":
        sizes.setdefault("ranks_per_server", 2 if len(tokens) % 2 == 0 else len(tokens))
    settings_ = Config(
        len(tokens),
        ROUND,
        scheme=scheme,
        product=product,
        relaxed=True,
        is_of_buffer=True,
        **sizes,
    )
    return Case(settings_, 5, "uniform", tokens, quantize)


def check(
    ranks: Groups,
    case: Case,
    *options: long_runs.Options,
    combine: long_runs.Options | None = None,
    repeats: bool = True,
    cached_bytes: int | None = None,
) -> None:
    given_ = options or (USUAL,) * 3
    results = ranks(case.config.num_ranks).run(
        long_runs.compare, case, given_, combine or {}, repeats, cached_bytes, timeout_s=seconds(120.0)
    )
    assert results == [[]] * case.config.num_ranks


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_with_any_number_of_rounds(ranks: Groups, scheme: str, quantize: str | None) -> None:
    """Whoever has one round, or none, hears of the others'; each call has other ranks with most."""
    check(ranks, case_of(scheme, (3, 4, 13, 0), quantize))


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2"])
def test_rounds_that_are_sent_ahead(ranks: Groups, scheme: str, quantize: str | None) -> None:
    case = replace(case_of(scheme, (3, 4, 13, 0), quantize), num_blocks=2)
    check(ranks, case, USUAL, {"num_recv_tokens": "exact"}, USUAL)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_rows_that_bypass_the_caches(ranks: Groups, quantize: str | None) -> None:
    """On two threads, so that somebody else than who has written them says that they are there."""
    case = replace(case_of("fullmesh_v1", (13, 5), quantize, hidden=2048), num_blocks=2)
    check(ranks, case, USUAL, {"num_recv_tokens": "exact"}, cached_bytes=0)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_whole_rounds_and_one_token_more(ranks: Groups, scheme: str) -> None:
    check(ranks, case_of(scheme, (8, 9)), *(USUAL,) * 2, repeats=False)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_scales_of_several_elements(ranks: Groups, scheme: str) -> None:
    case = case_of(scheme, (9, 2), "int8_128", hidden=256)
    check(ranks, replace(case, smooth=True))


AS_ASKED_FOR: list[long_runs.Options] = [
    {"num_max_tokens_per_rank": 16},
    {"num_max_tokens_per_rank": 16, "num_recv_tokens": "exact"},
    {"num_recv_tokens": "exact"},
    {"num_recv_tokens": 120},
    {"expert_alignment": 8},
    {"expert_alignment": 3, "num_recv_tokens": 150, "do_zero_padding": True},
    {"layout": "padded"},
    {"layout": "padded", "num_recv_tokens": 40},
    {"layout": "padded", "num_max_tokens_per_rank": 13, "do_zero_padding": True},
]


@pytest.mark.parametrize(("options", "scheme"), pairs(AS_ASKED_FOR))
def test_outputs_as_asked_for(ranks: Groups, scheme: str, options: long_runs.Options) -> None:
    check(ranks, case_of(scheme, (3, 4, 13, 0)), options, options)


@pytest.mark.parametrize(
    ("options", "scheme"),
    pairs(
        [
            {"num_recv_tokens": "exact"},
            {"expert_alignment": 4},
            {"layout": "padded"},
            {"num_max_tokens_per_rank": 4},
        ]
    ),
)
def test_outputs_of_one_round(ranks: Groups, scheme: str, options: long_runs.Options) -> None:
    check(ranks, case_of(scheme, (4, 0), "int8"), options, options)


@pytest.mark.parametrize(
    ("product", "scheme", "tokens"),
    [
        ("A3", "fullmesh_v1", (9, 2)),
        ("A2", "hierarchy", (9, 2, 0, 4)),
        ("A3", "hierarchy", (9, 2)),  # of one machine
    ],
)
def test_results_that_travel_as_int8(
    ranks: Groups, product: Product, scheme: str, tokens: tuple[int, ...]
) -> None:
    """Their bits are those of the same call by a buffer with room for one round: see below."""
    case, quantized = case_of(scheme, tokens, product=product), {"comm_quantize": "int8"}
    results = ranks(len(tokens)).run(sums_of_both, case, quantized, {}, timeout_s=seconds(120.0))
    assert results == [True] * len(tokens)


def sums_of_both(
    rank: int, num_ranks: int, case: Case, combine: long_runs.Options, dispatch: long_runs.Options
) -> bool:
    """Whether a buffer of small rounds gives what one with room for all gives, in any part of the sums."""
    sums = []
    for most in (ROUND, max(case.tokens)):
        sized = replace(case, config=replace(case.config, num_max_tokens_per_rank=most))
        with long_runs.make_buffer(sized) as buffer:
            inputs = long_runs.inputs_of(case, rank, 0)
            output = long_runs.dispatched(buffer, case, inputs, **dispatch)
            y = long_runs.results_of(case, rank, output)
            given_ = {name: value(inputs) if callable(value) else value for name, value in combine.items()}
            sums.append(buffer.combine(y, output.handle, inputs.topk_weights, **given_))
    return torch.equal(*sums)


def last_results(inputs: Any) -> torch.Tensor:
    return inputs.x * 2


def by_halves(inputs: Any) -> torch.Tensor:
    return (inputs.x * 3).view(1, *inputs.x.shape)


@pytest.mark.parametrize("scheme", SCHEMES[:2])
@pytest.mark.parametrize("brought", [last_results, by_halves])
def test_a_shared_experts_results(ranks: Groups, scheme: str, brought: Callable[[Any], torch.Tensor]) -> None:
    args = case_of(scheme, (9, 2)), {"shared_expert_x": brought}, {}
    assert ranks(2).run(sums_of_both, *args, timeout_s=seconds(120.0)) == [True] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dims", [1, 2])
def test_masks(ranks: Groups, scheme: str, dims: int) -> None:
    args = case_of(scheme, (10, 7)), dims
    assert ranks(2).run(masked_sums, *args, timeout_s=seconds(120.0)) == [True] * 2


def masked_sums(rank: int, num_ranks: int, case: Case, dims: int) -> bool:
    inputs = long_runs.inputs_of(case, rank, 0)
    mask = torch.arange(len(inputs.x)) < len(inputs.x) - 3
    if dims == 2:
        mask = torch.rand(inputs.topk_idx.shape, generator=torch.Generator().manual_seed(rank)) < 0.6
    return sums_of_both(rank, num_ranks, case, {}, {"active_mask": mask})


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_special_experts_waits_and_counts(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(with_everything, case_of(scheme, (10, 7)), timeout_s=seconds(120.0)) == [[]] * 2


def with_everything(rank: int, num_ranks: int, case: Case) -> list[str]:
    """What a buffer of small rounds gives otherwise than one with room for all."""
    scheme, given_ = case.config.scheme, []
    num_const = 0 if scheme == "fullmesh" else 1  # A2 has none
    first = case.config.num_experts
    ids = long_runs.inputs_of(case, rank, 0).topk_idx.clone()
    ids[::3, 0], ids[1::3, 0] = first, first + 1
    if num_const:
        ids[2::3, 0] = first + 2
    inputs = replace(long_runs.inputs_of(case, rank, 0), topk_idx=ids)
    alphas = {f"const_expert_alpha_{n}": torch.full((1, 64), float(n)).bfloat16() for n in (1, 2)}
    const = {**alphas, "const_expert_v": torch.ones(1, 64).bfloat16()} if num_const else {}
    for most in (ROUND, max(case.tokens)):
        sized = replace(case, config=replace(case.config, num_max_tokens_per_rank=most))
        stats, waits = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        numbers = {"num_zero_experts": 1, "num_copy_experts": 1, "num_const_experts": num_const}
        with long_runs.make_buffer(sized, **numbers) as buffer:
            output = buffer.dispatch(
                inputs.x,
                inputs.topk_idx,
                inputs.topk_weights,
                cumulative_local_expert_recv_stats=stats,
                performance_info=waits,
            )
            y = long_runs.results_of(case, rank, output)
            sums = buffer.combine(
                y, output.handle, inputs.topk_weights, ori_x=inputs.x, performance_info=waits, **const
            )
        rows = long_runs.compact(output)
        given_.append((sums, stats, rows.tokens[: output.handle.num_received()], waits > 0))
    names = "sums", "stats", "tokens", "waits"
    return [name for name, small, large in zip(names, *given_, strict=True) if not torch.equal(small, large)]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2"])
def test_ranks_of_shared_experts(ranks: Groups, scheme: str) -> None:
    case = case_of(scheme, (3, 4, 13, 0), num_experts=6, num_shared_experts=1, num_shared_ranks=1)
    check(ranks, case, USUAL, {"expert_alignment": 4, "num_recv_tokens": "exact"}, {"layout": "padded"})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_padded_and_own_numbers_of_experts(ranks: Groups, scheme: str) -> None:
    case = case_of(scheme, (9, 2), hidden=100, num_experts=4, experts_per_rank=(3, 1))
    check(ranks, case, USUAL, {"expert_alignment": 4}, {"layout": "padded", "num_recv_tokens": "exact"})


@pytest.mark.parametrize("where", ["earlier output", "larger tensors"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_that_are_given(ranks: Groups, scheme: str, where: str) -> None:
    assert ranks(2).run(into_given, scheme, where, timeout_s=seconds(120.0)) == [[]] * 2


def into_given(rank: int, num_ranks: int, scheme: str, where: str) -> list[str]:
    wrong = []
    for quantize in (None, "int8"):
        case = case_of(scheme, (9, 2), quantize)
        received, _ = long_runs.expected_round(case, 0)
        with long_runs.make_buffer(case) as buffer:
            inputs = long_runs.inputs_of(case, rank, 0)
            # Of a rank that has one round, an ordinary call fills what there can be at most.
            options = {"num_recv_tokens": "exact"} if where == "earlier output" else {}
            first = long_runs.dispatched(buffer, case, inputs, **options)
            out = first
            if where == "larger tensors":
                longer = {
                    name: torch.cat([tensor, tensor])
                    for name, tensor in first._asdict().items()
                    if name in ("tokens", "scales", "weights") and tensor is not None
                }
                out = first._replace(**longer)
            output = long_runs.dispatched(buffer, case, inputs, out=out, **options)
            wrong += long_runs.wrong_of(output, received[rank])
            if output.tokens.data_ptr() != out.tokens.data_ptr():
                wrong.append("tokens are elsewhere")
    return wrong


CAPACITY = {"num_recv_tokens": 5}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([[CAPACITY]], ["num_recv_tokens", "room for 5"]),
        ([[{"num_recv_tokens": 500}, CAPACITY]], ["num_recv_tokens", "rank 1 has room for 5"]),
        ([[CAPACITY | {"layout": "padded"}]], ["num_recv_tokens", "of an expert"]),
        (
            [[{"num_max_tokens_per_rank": 16}, {"num_max_tokens_per_rank": 17}]],
            ["num_max_tokens_per_rank", "16 on rank 0, 17 on rank 1"],
        ),
    ],
    ids=["too small everywhere", "too small on one rank", "padded", "other numbers"],
)
@pytest.mark.parametrize(
    "scheme",
    ["fullmesh_v2", *(pytest.param(s, marks=pytest.mark.long) for s in SCHEMES if s != "fullmesh_v2")],
)
def test_what_all_ranks_refuse_leaves_the_buffer_usable(
    ranks: Groups, scheme: str, options: list[list[long_runs.Options]], names: list[str]
) -> None:
    case = case_of(scheme, (13, 5))  # of other numbers of rounds
    for said in ranks(2).run(long_runs.refused, case, options * 2, True, timeout_s=seconds(120.0)):
        assert len(said) == 2
        for text in said:
            assert text.startswith("ArgumentError")
            assert all(name in text for name in names), text


REFUSED: list[tuple[long_runs.Options, str]] = [
    ({"num_max_tokens_per_rank": 12}, "num_max_tokens_per_rank=12"),
    ({"num_max_tokens_per_rank": -1}, "num_max_tokens_per_rank"),
    ({"num_recv_tokens": 0}, "num_recv_tokens"),
    ({"num_recv_tokens": "all"}, "num_recv_tokens"),
    ({"expert_alignment": 0}, "expert_alignment"),
    ({"expert_alignment": 1 << 17}, "expert_alignment"),
    ({"expert_alignment": 2.0}, "expert_alignment"),
    ({"expert_alignment": 2, "layout": "padded"}, "expert_alignment"),
    ({"layout": "blocks"}, "layout"),
    ({"do_zero_padding": 1}, "do_zero_padding"),
    ({"wait": False}, "wait"),
    ({"out": torch.empty(3, 65, dtype=torch.bfloat16)}, "out"),
]


def test_what_is_refused_before_anything_is_sent(ranks: Groups) -> None:
    case = case_of("fullmesh_v1", (13, 13))
    options = [[options] for options, _ in REFUSED]
    for said in ranks(2).run(long_runs.refused, case, options, True, timeout_s=seconds(120.0)):
        assert len(said) == len(REFUSED)
        for text, (_, name) in zip(said, REFUSED, strict=True):
            assert text.startswith("ArgumentError"), text
            assert name in text


def test_given_outputs_that_are_too_small_keep_nobody_else_from_theirs(ranks: Groups) -> None:
    case = case_of("fullmesh_v1", (13, 2, 5, 0))
    small = torch.empty(2, 64, dtype=torch.bfloat16)
    options: list[list[long_runs.Options]] = [[{"out": small}, USUAL, USUAL, USUAL]] * 2
    said = ranks(4).run(long_runs.refused, case, options, True, timeout_s=seconds(120.0))
    assert said[1:] == [["", ""]] * 3
    assert len(said[0]) == 2
    assert all(text.startswith("ArgumentError") and "out" in text for text in said[0])


def test_direct_says_what_to_do_instead(ranks: Groups) -> None:
    case = case_of("direct", (13, 13))
    options: list[list[long_runs.Options]] = [[USUAL], [{"num_recv_tokens": "exact", "tokens": 2}]]
    for said in ranks(2).run(long_runs.refused, case, options, False, timeout_s=seconds(60.0)):
        assert all(text.startswith("ArgumentError") and "outputs='own'" in text for text in said)


def test_options_on_some_ranks_only_are_named(ranks: Groups) -> None:
    case = case_of("fullmesh_v1", (3, 3))
    options: list[list[long_runs.Options]] = [[{"num_recv_tokens": "exact"}, USUAL]]
    for said in ranks(2).run(long_runs.refused, case, options, False, timeout_s=seconds(60.0)):
        (text,) = said
        assert text.startswith("ConfigMismatchError")
        assert "num_recv_tokens" in text


@pytest.mark.parametrize("do_expand", [True, False])
def test_a_refused_call_counts_nothing(ranks: Groups, do_expand: bool) -> None:
    args = case_of("fullmesh_v1", (13, 5)), do_expand
    assert ranks(2).run(counted, *args, timeout_s=seconds(60.0)) == [True] * 2


def counted(rank: int, num_ranks: int, case: Case, do_expand: bool) -> bool:
    """Whether the caller's counts are what they were, and then those of a call that delivers."""
    inputs, stats = long_runs.inputs_of(case, rank, 0), torch.zeros(2, dtype=torch.int32)
    with long_runs.make_buffer(case) as buffer:
        call = inputs.x, inputs.topk_idx, None, stats
        with pytest.raises(ArgumentError, match="num_recv_tokens"):
            buffer.dispatch(*call, num_recv_tokens=1, do_expand=do_expand)
        is_untouched = not bool(stats.any())
        output = buffer.dispatch(*call, num_recv_tokens="exact", do_expand=do_expand)
        return is_untouched and stats.tolist() == output.tokens_per_expert.tolist()


def test_a_handle_on_one_rank_only_is_named(ranks: Groups) -> None:
    for said in ranks(2).run(mixed, case_of("fullmesh_v1", (13, 3)), timeout_s=seconds(60.0)):
        assert said.startswith("ConfigMismatchError")
        assert "the routing of a handle" in said


def mixed(rank: int, num_ranks: int, case: Case) -> str:
    inputs = long_runs.inputs_of(case, rank, 0)
    with long_runs.make_buffer(case, timeout_s=seconds(5.0)) as buffer:
        few = buffer.dispatch(inputs.x[:2], inputs.topk_idx[:2])
        try:
            if rank == 1:
                buffer.dispatch(inputs.x[:2], handle=few.handle)
            else:
                buffer.dispatch(inputs.x, inputs.topk_idx)
        except MoeTritonError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_traces_have_the_phases_of_rounds(ranks: Groups, tmp_path: Path, quantize: str | None) -> None:
    path = tmp_path / "trace.json"
    ranks(2).run(traced, case_of("fullmesh_v1", (13, 3), quantize), str(path), timeout_s=seconds(60.0))
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "operator"}
    # A dispatch of rank 0 has four rounds: numbers 1 to 4 behind that of a call of one.
    assert {
        "dispatch #0",
        "dispatch #1 routing",
        "dispatch #1 ring",
        "dispatch #1 starts",
        "dispatch #1 fill",
        "dispatch #4 round",
        "dispatch #5",
        "dispatch #9 round",
        "dispatch #9 local_counts",
    } <= names
    assert not any(name.startswith("dispatch #10") for name in names)


def traced(rank: int, num_ranks: int, case: Case, path: str) -> None:
    inputs = long_runs.inputs_of(case, rank, 0)
    few = inputs.x[:2], inputs.topk_idx[:2]
    with long_runs.make_buffer(case, trace=path) as buffer:
        buffer.dispatch(*few, quantize=case.quantize)
        long_runs.dispatched(buffer, case, inputs, num_recv_tokens="exact")
        buffer.dispatch(*few, quantize=case.quantize)
        buffer.dispatch(inputs.x, inputs.topk_idx, quantize=case.quantize, do_expand=False)


def test_handles_that_are_not_as_dispatch_made_them_are_refused(ranks: Groups) -> None:
    case = case_of("fullmesh_v1", (9, 6))
    for said in ranks(2).run(long_runs.tampered, case, timeout_s=seconds(120.0)):
        assert said == []


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_call_that_ends_between_rounds_leaves_nobody_in_the_dark(ranks: Groups, when: str) -> None:
    ended, told = ranks(2).run(interrupted, case_of("fullmesh_v1", (13, 2)), when, timeout_s=seconds(60.0))
    assert ended == "KeyboardInterrupt, then the buffer is broken"
    assert told == "rank 0 has left: dispatch number 1 ended in KeyboardInterrupt"


def interrupted(rank: int, num_ranks: int, case: Case, when: str) -> str:
    """What a rank that is interrupted between two rounds says, and what the other one does."""
    with long_runs.make_buffer(case, timeout_s=seconds(3.0)) as buffer:
        inputs = long_runs.inputs_of(case, rank, 0)
        run = Communicator.run_phases

        def stopped(self: Communicator, phases: Sequence[PhaseRun]) -> None:
            rounds = [number for number, each in enumerate(phases) if each.phase == "round"]
            if rank == 0 and rounds:
                run(self, phases[: rounds[0 if when == "first" else 1]])
                raise KeyboardInterrupt
            run(self, phases)

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Communicator, "run_phases", stopped)
                long_runs.dispatched(buffer, case, inputs)
        except KeyboardInterrupt:
            try:
                long_runs.dispatched(buffer, case, inputs)
            except BufferStateError as error:
                return "KeyboardInterrupt, then " + str(error).partition(":")[0]
        except CommunicationTimeoutError as error:
            return re.findall(r"rank 0 has left: [^.]*", str(error))[0].replace("number 2", "number 1")
    return ""


@st.composite
def long_cases(draw: st.DrawFn) -> tuple[Case, long_runs.Options]:
    scheme = draw(st.sampled_from(SCHEMES[:3]))
    tokens = tuple(draw(st.lists(st.integers(0, 14), min_size=2, max_size=2)))
    case = case_of(scheme, tokens, draw(st.sampled_from([None, "int8"])), num_topk=draw(st.integers(1, 4)))
    case = replace(
        case,
        seed=draw(st.integers(0, 999)),
        routing=draw(st.sampled_from(["uniform", "skewed", "sparse", "none"])),
        num_blocks=draw(st.sampled_from([None, 1, 2, 3])),
        weights=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
    )
    options = draw(
        st.sampled_from(
            [
                USUAL,
                {"num_max_tokens_per_rank": 14},
                {"num_recv_tokens": "exact"},
                {"expert_alignment": draw(st.integers(1, 9)), "num_recv_tokens": "exact"},
                {"layout": "padded"},
            ]
        )
    )
    return case, options


@pytest.mark.long
@given(long_cases())
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_case(ranks: Groups, drawn: tuple[Case, long_runs.Options]) -> None:
    case, options = drawn
    check(ranks, case, options, options)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [(4096, 1), (511, 513), (16384, 512), (32768, 0)], ids=str)
def test_numbers_of_tokens_that_are_served(ranks: Groups, tokens: tuple[int, ...]) -> None:
    case = case_of("fullmesh_v1", tokens, hidden=32)
    case = replace(case, config=replace(case.config, num_max_tokens_per_rank=512))
    check(ranks, case, USUAL, repeats=False)


MANY_TOKENS, LONG = 2**18 + 700, 8192
"""Of rows so long they have more than 2**31 elements."""


def beyond_int32(rank: int, num_ranks: int) -> list[bool]:
    """Whether tokens and sums are what they are to be where their numbers of elements need 64 bits."""
    sizes = {"hidden": LONG, "num_topk": 1, "num_experts": 1, "num_max_tokens_per_rank": 512}
    x = torch.zeros(MANY_TOKENS, LONG, dtype=torch.bfloat16)  # of which few pages are ever touched
    told = (0, 2**18 - 1, 2**18, MANY_TOKENS - 1)
    for token in told:
        x[token] = torch.randn(LONG, generator=torch.Generator().manual_seed(token)).bfloat16()
    ids, weights = torch.zeros(MANY_TOKENS, 1, dtype=torch.int32), torch.full((MANY_TOKENS, 1), 2.0)
    with EPBuffer(comm_alg="fullmesh_v1", timeout_s=seconds(60.0), **sizes) as buffer:
        output = buffer.dispatch(x, ids)
        found = [output.tokens.numel() > 2**31]
        found += [torch.equal(output.tokens[token], x[token]) for token in told]
        y, handle = output.tokens, output.handle
        del output
        out = buffer.combine(y, handle, weights, out=x)
        found += [torch.equal(out[token], 2 * y[token]) for token in told]
        return [*found, not bool(out[told[0] + 1 : told[1] : 4096].any())]


@pytest.mark.long
def test_outputs_of_more_elements_than_32_bits_count(ranks: Groups) -> None:
    (found,) = ranks(1).run(beyond_int32, timeout_s=seconds(200.0))
    assert all(found)
