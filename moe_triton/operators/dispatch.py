"""Dispatch, in both versions and in halves: docs/operators.md, "Outputs" and "Outputs of the halves"."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.core.row_formats import AS_THEY_ARE, BY_QUANT_MODE, INT8
from moe_triton.operators.description import Modes, Operator, Output, TensorArgument
from moe_triton.operators.variants import DispatchVariant

FLOATS = (torch.bfloat16, torch.float16)

IDS = TensorArgument("topk_idx", "(BS, K)", (torch.int32, torch.int64), is_usual=True)
MASK = TensorArgument(
    "active_mask",
    "(BS,)",
    torch.bool,
    placeholders=("mask",),
    mode="mask",
    other_shape="(BS, K)",
    by_dims=("tokens", "entries"),
)
WEIGHTS = TensorArgument(
    "topk_weights",
    "(BS, K)",
    (torch.float32, *FLOATS),
    read_as=torch.float32,
    mode="weights",
    is_usual=True,
)
ELASTIC = TensorArgument("elastic_info", placeholders=(), mode="elastic", on_any_device=True)
WAITS = TensorArgument(
    "performance_info",
    "(EP,)",
    torch.int64,
    mode="waits",
    is_written=True,
)
STATS = TensorArgument(
    "cumulative_local_expert_recv_stats",
    "(localE,)",
    torch.int32,
    placeholders=("recv_stats",),
    mode="recv_stats",
    is_written=True,
    is_usual=True,
)
TICKET = TensorArgument("comm_cmd_info", "(n,)", torch.int32, placeholders=(), of_setup=True)

TENSORS = (
    TensorArgument("x", "(BS, H)", FLOATS, is_usual=True),
    IDS,
    TensorArgument("smooth_scales", "(S + M, H)", torch.float32, mode="smooth", is_usual=True),
    MASK,
    replace(WEIGHTS, empty_is_none=True),
    ELASTIC,
    WAITS,
    STATS,
    TensorArgument("packed_x", "(BS * (K + S), Hs)", ("x", torch.int8), placeholders=(), of_setup=True),
    TICKET,
)

MODES: Modes = {
    "row_format": lambda s: BY_QUANT_MODE.get(s["quant_mode"], AS_THEY_ARE),
    "cumulative": lambda s: s["expert_token_nums_type"] == 0,
    "exchange": lambda s: s["tp_world_size"] == 2,
    "given_ids": lambda s: s["given_ids"],
}

INDEX = Output("expand_idx", "(BS * K,)", torch.int32)
ROWS = (
    Output("tokens", "(A * tp, H)", "row"),
    Output("scales", "(A * tp,)", torch.float32),
)
ORIGINS = Output("origins", "(max(BS * K, 128 * A),)", torch.int32)
COUNTS = (
    Output("tokens_per_expert", "(localE,)", torch.int64),
    Output(
        "recv_offsets",
        "(EP * localE * tp,)",
        torch.int32,
        with_argument=("topk_weights", "(max(EP * localE * tp, EP * localE + 2 * G * K * servers),)"),
    ),
    Output("exchange_counts", "(tp_world_size,)", torch.int32),
    Output("weights", "(0,)", torch.float32, with_argument=("topk_weights", "(A,)")),
)

DISPATCH = Operator(
    "dispatch", 2, DispatchVariant, TENSORS, (*ROWS, ORIGINS, *COUNTS), MODES, unreturned=(INDEX,)
)
DISPATCH_V1 = replace(
    DISPATCH,
    version=1,
    outputs=(*ROWS, INDEX, *COUNTS),
    modes={**MODES, "row_format": lambda s: INT8 if s.is_given("smooth_scales") else MODES["row_format"](s)},
    unreturned=(replace(ORIGINS, shape="(3 * A + trailer,)"),),
)
# Where combine finds results by the ids alone.
DISPATCH_OF_A2 = replace(
    DISPATCH,
    outputs=(*ROWS, replace(INDEX, shape=ORIGINS.shape), *COUNTS),
    unreturned=(replace(ORIGINS, shape="(3 * A + trailer,)"),),
)
DISPATCH_SETUP = replace(
    DISPATCH,
    name="dispatch_setup",
    outputs=(
        Output("packed_x", "(BS * (K + S), W)", "row"),
        INDEX,
        Output("comm_cmd_info", "(16 * (BS * (K + S) + EP * localE),)", torch.int32),
    ),
    unreturned=(),
)
DISPATCH_TEARDOWN = replace(
    DISPATCH, name="dispatch_teardown", outputs=DISPATCH.outputs[:4], unreturned=COUNTS[1:]
)
