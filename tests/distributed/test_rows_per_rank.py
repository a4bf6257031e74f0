"""Dispatches with one row for each token and rank (``do_expand=False``), and their combines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from moe_triton import DispatchHandle, DispatchOutput, EPBuffer, Tuning, reference
from moe_triton.core.handle import OF_RANKS
from moe_triton.processes import RankGroup
from moe_triton.reference import ReceivedPerRank
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of, small_case, smooth_scales_of
from tests.distributed.failures import not_refused
from tests.distributed.test_whole_calls import pythons_runs
from tests.distributed.workers import by_turns, make_buffer
from tests.headers import needs_headers

Groups = Callable[[int], RankGroup]
Expected = tuple[list[ReceivedPerRank], list[torch.Tensor]]


def masked(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return ids
    return ids.where(mask if mask.dim() == 2 else mask[:, None], -1)


def mask_of(case: Case, rank: int, number: int, dims: int) -> torch.Tensor | None:
    tokens = len(inputs_of(case, rank, number).x)
    if dims == 1:
        return torch.arange(tokens) < tokens - 1
    generator = torch.Generator().manual_seed(number * 100 + rank)
    return torch.rand(tokens, case.config.num_topk, generator=generator) < 0.7 if dims else None


def expected_round(case: Case, number: int, dims: int = 0, comm_quant_mode: int = 0) -> Expected:
    everyone = [inputs_of(case, rank, number) for rank in range(case.config.num_ranks)]
    ids = [masked(own.topk_idx, mask_of(case, rank, number, dims)) for rank, own in enumerate(everyone)]
    weights = [own.topk_weights for own in everyone] if case.weights else None
    x = [own.x for own in everyone]
    received = reference.dispatch_per_rank(case.config, x, ids, weights, quantize=case.quantize)
    y = [experts_of(case, rank, own.tokens) for rank, own in enumerate(received)]
    sizes = list(map(len, x))
    mode = {"comm_quant_mode": comm_quant_mode}
    return received, reference.combine_per_rank(case.config, y, received, sizes, **mode)


def wrong_parts(output: DispatchOutput, received: ReceivedPerRank) -> list[str]:
    n, handle = len(received.tokens), output.handle
    pairs = {
        "tokens": (output.tokens, received.tokens),
        "scales": (output.scales, received.scales),
        "sources": (handle.origins[:, :2], received.sources),
        "local_topk_idx": (handle.local_topk_idx, received.local_topk_idx),
        "local_topk_weights": (handle.local_topk_weights, received.local_topk_weights),
    }
    wrong = [
        name
        for name, (have, want) in pairs.items()
        if (have is None) != (want is None) or (have is not None and not torch.equal(have[:n], want))
    ]
    if not torch.equal(output.tokens_per_expert, received.tokens_per_expert):
        wrong.append("tokens_per_expert")
    if handle.num_received() != n or output.weights is not None:
        wrong.append("number of rows, or weights")
    return wrong


def dispatched(buffer: EPBuffer, case: Case, own: Inputs, **options: Any) -> DispatchOutput:
    weights = own.topk_weights if case.weights else None
    given = {"quantize": case.quantize, "do_expand": False, **options}
    made: Any = buffer.dispatch(own.x, own.topk_idx, weights, **given)
    return made if isinstance(made, DispatchOutput) else made.wait()


def compared(
    rank: int, num_ranks: int, case: Case, options: dict[str, Any], dims: int, comm: str | None
) -> list[str]:
    """Names what is not the reference's. Every second round is plain: zones and turns are the same."""
    wrong = []
    expected = by_turns(lambda number: expected_round(case, number, dims, 2 * bool(comm)), case.rounds)
    with make_buffer(case, **options) as buffer:
        stats = torch.zeros(buffer.num_local_experts, dtype=torch.int32)
        counted = stats.clone()
        for number in range(case.rounds):
            own, halves = inputs_of(case, rank, number), number % 4 > 1
            received, sums = expected[number]
            mask = mask_of(case, rank, number, dims)
            given = {"active_mask": mask, "cumulative_local_expert_recv_stats": stats, "wait": not halves}
            output = dispatched(buffer, case, own, **given)
            counted += received[rank].tokens_per_expert
            wrong += [f"round {number}: {name}" for name in wrong_parts(output, received[rank])]
            y = buffer.expert_output()
            y.copy_(experts_of(case, rank, torch.zeros(y.shape)))
            n = len(received[rank].tokens)
            y[:n] = experts_of(case, rank, output.tokens[:n])
            combined: Any = buffer.combine(y, output.handle, comm_quantize=comm, wait=not halves)  # type: ignore[arg-type]
            if not torch.equal(combined.wait() if halves else combined, sums[rank]):
                wrong.append(f"round {number}: combined")
            if not torch.equal(stats, counted):
                wrong.append(f"round {number}: stats")
            if number % 2:
                plain = buffer.dispatch(own.x, own.topk_idx)
                buffer.combine(plain.tokens, plain.handle)
                if plain.handle.results_idx is not None or plain.handle.local_topk_idx is not None:
                    wrong.append("a plain handle")
    return wrong


def case_of(num_ranks: int, scheme: str, config: dict[str, Any] | None = None, **changes: Any) -> Case:
    case = small_case(num_ranks, scheme, rounds=6, tokens=(4, 3, 0, 2)[:num_ranks], **changes)
    sizes = {"num_topk": 4, "num_experts": 3 * num_ranks, **(config or {})}
    return replace(case, config=replace(case.config, **sizes))


NO_OPTIONS: dict[str, Any] = {}
SERVERS = {"ranks_per_server": 2}
FORMATS = None, "int8", "int8_128"
CASES: dict[str, tuple[Case, dict[str, Any], int, str | None]] = {
    f"{scheme} {quantize}": (case_of(2, scheme, quantize=quantize), NO_OPTIONS, 0, None)
    for scheme in ("fullmesh_v1", "fullmesh_v2", "fullmesh")
    for quantize in FORMATS
}
CASES |= {
    "four ranks": (case_of(4, "fullmesh_v1"), NO_OPTIONS, 0, None),
    "four ranks in band, fp16": (case_of(4, "fullmesh_v2", dtype=torch.float16), NO_OPTIONS, 0, None),
    "four ranks in blocks": (case_of(4, "fullmesh"), NO_OPTIONS, 0, None),
    "no weights": (case_of(2, "fullmesh_v1", weights=False), NO_OPTIONS, 0, None),
    "nothing": (case_of(2, "fullmesh_v1", routing="none"), NO_OPTIONS, 0, None),
    "all experts": (case_of(2, "fullmesh_v1", {"num_topk": 6}), NO_OPTIONS, 0, None),
    "mask of tokens": (case_of(2, "fullmesh_v1"), NO_OPTIONS, 1, None),
    "mask of entries": (case_of(2, "fullmesh_v2"), NO_OPTIONS, 2, None),
    "mask in blocks": (case_of(2, "fullmesh"), NO_OPTIONS, 2, None),
    "results as int8": (case_of(2, "fullmesh_v1"), NO_OPTIONS, 0, "int8"),
    "padded": (case_of(2, "fullmesh_v1", {"hidden": 65}), NO_OPTIONS, 0, None),
    "own numbers": (case_of(2, "fullmesh_v2", {"experts_per_rank": (4, 2)}), NO_OPTIONS, 0, None),
    "a rank without experts": (case_of(2, "fullmesh_v1", {"experts_per_rank": (0, 6)}), NO_OPTIONS, 0, None),
    "servers": (case_of(4, "fullmesh_v1", SERVERS), NO_OPTIONS, 0, None),
    "servers in blocks": (case_of(4, "fullmesh", SERVERS, quantize="int8"), NO_OPTIONS, 0, None),
    "parts": (
        case_of(2, "fullmesh_v1", num_blocks=2),
        {"tuning": Tuning(dispatch_tokens=2, combine_tokens=2, communication_blocks=1)},
        0,
        None,
    ),
    "received while sent": (
        case_of(2, "fullmesh_v2", num_blocks=2),
        {"tuning": Tuning(receiving_blocks=1)},
        0,
        None,
    ),
    "in torch": (case_of(2, "fullmesh_v1", quantize="int8", kernels="torch"), NO_OPTIONS, 2, None),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_sums_are_the_references(ranks: Groups, name: str) -> None:
    case, options, dims, comm = CASES[name]
    num_ranks = case.config.num_ranks
    assert ranks(num_ranks).run(compared, case, options, dims, comm) == [[]] * num_ranks


def natively(rank: int, num_ranks: int, case: Case) -> list[str]:
    """What is wrong in rounds of calls that are all usual, and how many of them Python ran."""
    wrong = []
    expected = by_turns(lambda number: expected_round(case, number), case.rounds)
    with make_buffer(case) as buffer:
        for number in range(case.rounds):
            own = inputs_of(case, rank, number)
            received, sums = expected[number]
            with pythons_runs() as seen:
                output = dispatched(buffer, case, own)
                y = experts_of(case, rank, output.tokens)
                combined = buffer.combine(y, output.handle)
            wrong += [f"round {number}: Python ran {seen}"] if seen and number > 1 else []
            wrong += [f"round {number}: {name}" for name in wrong_parts(output, received[rank])]
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
            twin = copy.deepcopy(output.handle)
            if not all(same(getattr(twin, f.name), getattr(output.handle, f.name)) for f in fields(twin)):
                wrong.append(f"round {number}: a copy of the handle")
            # Natively no weights are taken either.
            again = partial(buffer.combine, y, output.handle, own.topk_weights)
            wrong += not_refused([("topk_weights is given", again)])
    return wrong


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Bits, since rows that are undefined may hold NaNs.
        alike = one.dtype is other.dtype and one.shape == other.shape
        return alike and torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))
    return one == other


@needs_headers
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
@pytest.mark.parametrize(("quantize", "weights"), [(None, True), ("int8", False), ("int8_128", True)])
def test_usual_calls_are_native(ranks: Groups, scheme: str, quantize: str | None, weights: bool) -> None:
    case = case_of(3, scheme, quantize=quantize, weights=weights, routing="sparse")
    assert ranks(3).run(natively, case) == [[]] * 3


def refused(rank: int, num_ranks: int, case: Case, options: dict[str, Any], start: str) -> list[str]:
    """What is otherwise than it is to be where a buffer sends no rows by rank, and goes on."""
    own = inputs_of(case, rank, 0)
    with make_buffer(case, **options) as buffer:
        calls: list[tuple[str, Callable[[], object]]] = [(start, lambda: dispatched(buffer, case, own))]
        wrong = not_refused(calls)
        weights, special = own.topk_weights, {"ori_x": own.x} if options else {}
        if "num_const_experts" in options:
            alphas = "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"
            special |= dict.fromkeys(alphas, torch.ones(1, case.config.hidden, dtype=case.dtype))
        output = buffer.dispatch(own.x, own.topk_idx, weights)
        buffer.combine(output.tokens, output.handle, weights, **special)
    return wrong


CANNOT = "do_expand is False, but "
REFUSED: dict[str, tuple[Case, dict[str, Any], str]] = {
    "direct": (case_of(2, "direct"), NO_OPTIONS, f"{CANNOT}comm_alg='direct' sends a row to each expert"),
    "hierarchy": (
        case_of(4, "hierarchy", SERVERS),
        NO_OPTIONS,
        f"{CANNOT}comm_alg='hierarchy' sends a row to each expert",
    ),
    "shared experts": (
        case_of(3, "fullmesh_v1", {"num_shared_experts": 1, "num_shared_ranks": 1, "num_experts": 6}),
        NO_OPTIONS,
        f"{CANNOT}the buffer has shared experts",
    ),
    "copy experts": (
        case_of(2, "fullmesh_v1"),
        {"num_copy_experts": 1},
        f"{CANNOT}the buffer has copy experts",
    ),
    "constant experts": (
        case_of(2, "fullmesh_v2"),
        {"num_const_experts": 1},
        f"{CANNOT}the buffer has constant experts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_row_for_each_expert_refuses(ranks: Groups, name: str) -> None:
    case, options, start = REFUSED[name]
    assert ranks(case.config.num_ranks).run(refused, case, options, start) == [[]] * case.config.num_ranks


def bad_calls(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Wrong messages, in a buffer that goes on to give what the reference gives."""
    own, smooth = inputs_of(case, rank, 0), smooth_scales_of(replace(case, smooth=True))
    received, sums = expected_round(case, 0)
    with make_buffer(case) as buffer:

        def d(**options: Any) -> Callable[[], object]:
            return lambda: dispatched(buffer, case, own, **options)

        calls = [
            ("smooth_scales is given, but with do_expand=False", d(smooth_scales=smooth)),
            ("do_expand is 0", d(do_expand=0)),
            ("do_expand is None", d(do_expand=None)),
        ]
        wrong = not_refused(calls)
        output = dispatched(buffer, case, own)
        y, weights = experts_of(case, rank, output.tokens), own.topk_weights
        short = y[: output.handle.num_received() - 1]
        calls = [
            (
                "topk_weights is given, but after do_expand=False",
                lambda: buffer.combine(y, output.handle, weights),
            ),
            ("y is of", lambda: buffer.combine(short, output.handle)),
        ]
        wrong += not_refused(calls)
        twin: DispatchHandle = copy.copy(output.handle)
        twin.topk_idx.fill_(-1)
        wrong += not_refused([("handle.topk_idx is other than", lambda: buffer.combine(y, twin))])
        for name, value in (
            ("topk_idx", output.handle.topk_idx.float()),
            ("topk_idx", output.handle.topk_idx[1:]),
            ("active_mask", torch.ones(9, dtype=torch.bool)),
            ("results_idx", [0]),
            ("results_idx", output.handle.results_idx[1:]),
        ):
            twin = copy.copy(output.handle)
            twin.__dict__[name] = value
            named = "topk_idx" if isinstance(value, torch.Tensor) and name == "results_idx" else name
            wrong += not_refused([(f"handle.{named} is", partial(buffer.combine, y, twin))])
        output = dispatched(buffer, case, own, out=output)
        wrong += wrong_parts(output, received[rank])
        if not torch.equal(buffer.combine(y, output.handle), sums[rank]):
            wrong.append("combined")
    return wrong


def test_bad_calls_send_nothing(ranks: Groups) -> None:
    assert ranks(2).run(bad_calls, case_of(2, "fullmesh_v1", quantize="int8", routing="uniform")) == [[], []]


def with_tensor_parallel_peer(rank: int, num_ranks: int) -> list[str]:
    import torch.distributed as dist

    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 2}
    x, ids = torch.ones(4, 64).bfloat16(), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    with EPBuffer(groups[rank % 2], tp_group=pairs[rank // 2], **sizes, relaxed=True) as buffer:
        calls = [(f"{CANNOT}the buffer has a tp_group", lambda: buffer.dispatch(x, ids, do_expand=False))]
        return not_refused(calls)


def test_tensor_parallel_ranks_refuse(ranks: Groups) -> None:
    assert ranks(4).run(with_tensor_parallel_peer) == [[]] * 4


def posted(rank: int, num_ranks: int, case: Case) -> list[tuple[int, int]]:
    """Bytes that a rank posts in a dispatch and in its combine, by layout of rows."""
    own, found = inputs_of(case, rank, 0), []
    with make_buffer(case) as buffer:
        for do_expand in (True, False):
            output = dispatched(buffer, case, own, do_expand=do_expand)
            buffer.combine(output.tokens if case.quantize is None else buffer.expert_output(), output.handle)
            traffic = [buffer.traffic("dispatch"), buffer.traffic("combine")]
            assert output.handle.traffic == traffic[0]
            counts = [each.payload_bytes.between + each.framing_bytes.between for each in traffic if each]
            found.append((counts[0], counts[1]))
    return found


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_less_than_half_of_the_bytes_travel(ranks: Groups, scheme: str, quantize: str | None) -> None:
    """As ranks count them that post to each other: of 64 experts on 4 ranks, 8 for each token."""
    sizes = {"hidden": 2048, "num_topk": 8, "num_experts": 64, "ranks_per_server": 1}
    sizes |= {"num_max_tokens_per_rank": 64}
    case = replace(case_of(4, scheme, sizes, quantize=quantize), tokens=(64,) * 4)
    found = torch.tensor(ranks(4).run(posted, case)).sum(0)
    dispatch, combine = (found[1] / found[0]).tolist()
    assert 0.4 < combine < 0.5
    assert 0.4 < dispatch < 0.5


def test_plain_handles_have_none_of_its_fields() -> None:
    handle = DispatchHandle(buffer_id=0, number=0)
    assert [getattr(handle, name) for name in OF_RANKS] == [None] * 3
    with pytest.raises(AttributeError, match="topk_idx"):
        handle.topk_idx  # noqa: B018


def with_zero_experts(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Entries of zero experts go nowhere; and how long each rank was waited for is recorded."""
    own, zero = inputs_of(case, rank, 0), torch.tensor(case.config.num_experts, dtype=torch.int32)
    ids = torch.where(own.topk_idx < 0, zero, own.topk_idx)
    ids[:, 1:][ids[:, 1:] == zero] = -1  # distinct in a row
    received, sums = expected_round(case, 0)
    waited = torch.zeros(2, num_ranks, dtype=torch.int64)
    with make_buffer(case, num_zero_experts=1) as buffer:
        output = dispatched(buffer, case, replace(own, topk_idx=ids), performance_info=waited[0])
        wrong = wrong_parts(output, received[rank])
        y = experts_of(case, rank, output.tokens)
        combined = buffer.combine(y, output.handle, performance_info=waited[1])
    wrong += [] if torch.equal(combined, sums[rank]) else ["combined"]
    return wrong if bool((waited[0] > 0).all()) else [*wrong, f"waited {waited}"]


def test_zero_experts_and_waits(ranks: Groups) -> None:
    assert ranks(2).run(with_zero_experts, case_of(2, "fullmesh_v1", routing="sparse")) == [[], []]
