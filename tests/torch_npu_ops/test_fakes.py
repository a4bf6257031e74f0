"""Shapes and dtypes of traced calls against docs/operators.md, "Outputs", written out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError
from moe_triton.torch_npu_ops import settings

BS, H, K, EP, M = 3, 64, 2, 8, 24
Described = list[tuple[tuple[int, ...], torch.dtype]]


def described(outputs: Any) -> Described:
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(isinstance(t, FakeTensor) for t in tensors)
    return [(tuple(t.shape), t.dtype) for t in tensors]


def tokens(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(BS, H, dtype=dtype), torch.empty(BS, K, dtype=torch.int32)


def experts_per_rank(ranks_shared: int) -> int:
    return M // (EP - ranks_shared)


def capacity(version: int, rank: int, s: int, r: int, global_bs: int, elastic: bool) -> int:
    """A, as docs/operators.md, "Symbols", has it."""
    everyone = global_bs or BS * EP
    routed = everyone * min(experts_per_rank(r), K)
    if not r:
        return routed
    shared = everyone // r if version == 1 else (everyone // EP) * -(-EP // (r // s))
    if elastic:
        return max(routed, shared)
    return shared if rank < r else routed


GRID = list(
    itertools.product(
        (1, 2),  # version
        (0, 1, 2),  # tp
        (False, True),  # quantised
        (False, True),  # expert_scales
        (False, True),  # elastic
        ((1, 0), (1, 2), (2, 4)),  # S, R
        (0, 7),  # rank
        (0, 5 * EP),  # global_bs
    )
)


def legal(version: int, elastic: bool, shared: tuple[int, int]) -> bool:
    return version == 2 or (not elastic and shared[0] == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dispatch_in_every_combination(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, ids = tokens(dtype)
        weights = torch.empty(BS, K)
        info = torch.empty(4 + 2 * EP, dtype=torch.int32)
        for version, tp, quantized, weighted, elastic, shared, rank, global_bs in GRID:
            if not legal(version, elastic, shared):
                continue
            s, r = shared
            options: dict[str, Any] = {
                "tp_world_size": tp,
                "quant_mode": 2 if quantized else 0,
                "expert_scales": weights if weighted else None,
                "shared_expert_num": s,
                "shared_expert_rank_num": r,
                "global_bs": global_bs,
            }
            call = ops.npu_moe_distribute_dispatch
            if version == 2:
                call = ops.npu_moe_distribute_dispatch_v2
                options["elastic_info"] = info if elastic else None
            a = capacity(version, rank, s, r, global_bs, elastic)
            local = 1 if rank < r and not elastic else experts_per_rank(r)
            rows, plain = a * max(tp, 1), EP * local
            counts = plain * max(tp, 1)
            if weighted:
                counts = max(counts, plain + 2 * (global_bs or BS * EP) * K * (EP // 8))
            assert described(call(x, ids, "group", EP, rank, M, **options)) == [
                ((rows, H), torch.int8 if quantized else dtype),
                ((rows,), torch.float32),
                ((BS * K if version == 1 else max(BS * K, a * 128),), torch.int32),
                ((local,), torch.int64),
                ((counts,), torch.int32),
                ((tp,), torch.int32),
                ((a if weighted else 0,), torch.float32),
            ], (version, options)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("product", "num_ranks", "given", "servers"),
    [
        ("A3", 8, None, 1),
        ("A3", 8, 2, 1),
        ("A3", 4, 2, 0),
        ("A3", 20, None, 2),
        ("A2", 8, None, 1),
        ("A2", 4, None, 1),
        ("A2", 12, None, 2),
        ("A2", 16, None, 2),
        ("A2", 4, 2, 2),
        ("A2", 8, 2, 4),
        ("A2", 4, [3, 1], 2),
        ("A2", 8, [1, 7], 2),
        ("A2", 16, 2, 8),
        ("A2", 16, 8, 2),
        ("A2", 2, 1, 2),
    ],
)
def test_what_a_hierarchy_keeps_grows_with_the_servers(
    product: Any, num_ranks: int, given: int | list[int] | None, servers: int, version: int
) -> None:
    experts = 3 * num_ranks
    call = {1: ops.npu_moe_distribute_dispatch, 2: ops.npu_moe_distribute_dispatch_v2}[version]
    settings.configure(product=product, ranks_per_server=given, relaxed=True)
    try:
        with FakeTensorMode():
            x, ids = tokens()
            weights = torch.empty(BS, K)
            plain = call(x, ids, "g", num_ranks, 0, experts)
            same = call(x, ids, "g", num_ranks, 0, experts, expert_scales=weights)
            most = call(x, ids, "g", num_ranks, 0, experts, expert_scales=weights, global_bs=5 * num_ranks)
    finally:
        settings.configure()
    assert plain[4].shape == (experts,)
    assert same[4].shape == (experts + 2 * BS * num_ranks * K * servers,)
    assert most[4].shape == (experts + 2 * 5 * num_ranks * K * servers,)


@pytest.mark.parametrize(("num_ranks", "given"), [(16, None), (32, None), (256, None), (4, 2), (8, 2)])
def test_what_a_hierarchy_keeps_on_a3_grows_as_if_servers_had_8_ranks(
    num_ranks: int, given: int | None
) -> None:
    experts, servers = num_ranks, num_ranks // (given or 16)
    settings.configure(ranks_per_server=given, relaxed=True)
    try:
        with FakeTensorMode():
            x, ids = tokens()
            named = {"expert_scales": torch.empty(BS, K), "comm_alg": "hierarchy"}
            made = ops.npu_moe_distribute_dispatch_v2(x, ids, "g", num_ranks, 0, experts, **named)
    finally:
        settings.configure()
    assert made[4].shape == (experts + 2 * BS * num_ranks * K * 2 * servers,)
    assert given or 2 * servers == num_ranks // 8


def test_scales_alone_quantise_in_the_first_version() -> None:
    with FakeTensorMode():
        x, ids = tokens()
        scales = torch.empty(M, H)
        v1 = ops.npu_moe_distribute_dispatch(x, ids, "g", EP, 0, M, scales=scales)
        v2 = ops.npu_moe_distribute_dispatch_v2(x, ids, "g", EP, 0, M, scales=scales)
    assert v1[0].dtype == torch.int8
    assert v2[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (None, torch.int8),
        (1, torch.int8),
        (15, torch.bfloat16),
        (24, torch.float8_e4m3fn),
        (290, torch.uint8),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e5m2, torch.float8_e5m2),
    ],
)
def test_y_dtype_changes_the_dtype_of_the_rows_and_nothing_else(number: Any, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, ids = tokens()
        plain = ops.npu_moe_distribute_dispatch_v2(x, ids, "g", EP, 0, M, quant_mode=2)
        out = ops.npu_moe_distribute_dispatch_v2(
            x, ids, "g", EP, 0, M, y_dtype=number, x_dtype=torch.bfloat16, scales_dtype=6, quant_mode=2
        )
        sent = ops.npu_moe_distribute_dispatch_setup(x, ids, "g", EP, 0, M, y_dtype=number, quant_mode=2)
    assert described(out) == [((BS * EP * K, H), dtype), *described(plain)[1:]]
    assert sent[0].dtype == dtype


def test_a_number_that_stands_for_no_dtype_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(ArgumentError, match="y_dtype is 99"):
        ops.npu_moe_distribute_dispatch_v2(*tokens(), "g", EP, 0, M, y_dtype=99)
    wrong: Any = torch.complex64
    with FakeTensorMode(), pytest.raises(ArgumentError, match=r"x_dtype is torch\.complex64"):
        ops.npu_moe_distribute_dispatch_v2(*tokens(), "g", EP, 0, M, x_dtype=wrong)


def test_a_dtype_is_a_number_in_a_trace() -> None:
    def step(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dtype: Any = torch.bfloat16
        return ops.npu_moe_distribute_dispatch_v2(x, ids, "g", EP, 7, M, y_dtype=dtype)[0]

    graph = make_fx(step, tracing_mode="symbolic")(*(t.zero_() for t in tokens()))
    call = next(node for node in graph.graph.nodes if "dispatch_v2" in str(node.target))
    assert call.kwargs["y_dtype"] == 15


@pytest.mark.parametrize("call", [ops.npu_moe_distribute_dispatch, ops.npu_moe_distribute_dispatch_v2])
def test_empty_expert_scales_are_none(call: Any) -> None:
    with FakeTensorMode():
        x, ids = tokens()
        plain = call(x, ids, "g", EP, 0, M)
        empty = call(x, ids, "g", EP, 0, M, expert_scales=torch.empty(0))
        assert described(empty) == described(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_combines(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        _, ids = tokens()
        y, index, counts = torch.empty(48, H, dtype=dtype), torch.empty(6144).int(), torch.empty(24).int()
        weights = torch.empty(BS, K)
        group = ("g", EP, 0, M)
        for call in (ops.npu_moe_distribute_combine, ops.npu_moe_distribute_combine_v2):
            for tp in (0, 1, 2):
                out = call(y, ids, index, counts, weights, *group, tp_world_size=tp)
                assert described(out) == [((BS, H), dtype)]
        out = call(y, ids, index, counts, None, *group)
        assert described(out) == [((BS, H), dtype)]
        residual, gamma = torch.empty(BS, 1, H).bfloat16(), torch.empty(H).bfloat16()
        three = ops.npu_moe_distribute_combine_add_rms_norm(
            y.bfloat16(), ids, index, counts, weights, residual, gamma, *group
        )
        assert described(three) == [
            ((BS, 1, H), torch.bfloat16),
            ((BS, 1, 1), torch.float32),
            ((BS, 1, H), torch.bfloat16),
        ]


@pytest.mark.parametrize("shared", [(1, 0), (0, 0), (1, 2), (2, 4)])
@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("rank", [0, 7])
def test_halves(shared: tuple[int, int], quant_mode: int, rank: int) -> None:
    """S counts in setup whether or not ranks hold shared experts."""

    def up(value: int, unit: int) -> int:
        return -(-value // unit) * unit

    s, r = shared
    local = 1 if rank < r else experts_per_rank(r)
    options = {"shared_expert_num": s, "shared_expert_rank_num": r}
    group = ("g", EP, rank, M)
    with FakeTensorMode():
        x, ids = tokens()
        y, index, info = ops.npu_moe_distribute_dispatch_setup(
            x, ids, *group, quant_mode=quant_mode, **options
        )
        width = up(up(H, 32) + 4, 512) if quant_mode else up(up(2 * H, 32), 512) // 2
        results = BS * (K + s)
        assert described((y, index, info)) == [
            ((results, width), torch.int8 if quant_mode else torch.bfloat16),
            ((BS * K,), torch.int32),
            (((results + EP * local) * 16,), torch.int32),
        ]
        a = capacity(2, rank, max(s, 1), r, 0, False)
        out = ops.npu_moe_distribute_dispatch_teardown(
            x, y, ids, info, *group, quant_mode=quant_mode, **options
        )
        assert described(out) == [
            ((a, H), torch.int8 if quant_mode else torch.bfloat16),
            ((a,), torch.float32),
            ((a * 128,), torch.int32),
            ((local,), torch.int64),
        ]
        z = torch.empty(a, H).bfloat16()
        sent = ops.npu_moe_distribute_combine_setup(z, ids, out[2], *group, **options)
        width = up(up(H, 32) + up(H, 8) // 8 * 4, 512)
        assert described(sent) == [((a, width), torch.int8), (((a + EP) * 16,), torch.int32)]
        combined = ops.npu_moe_distribute_combine_teardown(z, sent[0], ids, index, None, sent[1], *group)
        assert described(combined) == [((BS, H), torch.bfloat16)]


def test_group_calls_return_what_they_were_given() -> None:
    with FakeTensorMode():
        x, _ = tokens()
        assert ops._npu_distribute_barrier(x, "g", EP) is x
        ops.npu_moe_distribute_buffer_reset(torch.empty(4 + 2 * EP).int(), "g", EP)


def test_a_trace_keeps_the_number_of_tokens_symbolic() -> None:
    def step(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows, _, index, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(x, ids, "g", EP, 7, M)
        return ops.npu_moe_distribute_combine_v2(rows, ids, index, counts, None, "g", EP, 7, M)

    graph = make_fx(step, tracing_mode="symbolic")(*(t.zero_() for t in tokens()))
    called = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert "moe_triton.npu_moe_distribute_dispatch_v2.default" in called
    assert "moe_triton.npu_moe_distribute_combine_v2.default" in called
    rows = next(n for n in graph.graph.nodes if n.name.startswith("getitem"))
    assert not isinstance(rows.meta["val"].shape[0], int)


def test_every_function_is_an_operator() -> None:
    names = [name for name in ops.__all__ if name.lstrip("_").startswith("npu_")]
    assert len(names) == 12
    for name in names:
        assert hasattr(torch.ops.moe_triton, name.lstrip("_")), name
