"""Dispatch, in both versions and in halves: docs/operators.md, "Outputs" and "Outputs of the halves"."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.core.row_formats import AS_THEY_ARE, BY_QUANT_MODE, INT8
from moe_triton.operators.description import Modes, Operator, Output, TensorArgument
from moe_triton.operators.variants import DispatchVariant

FLOATS = (torch.bfloat16, torch.float16)

IDS = TensorArgument(
    "expert_ids", "(BS, K)", (torch.int32, torch.int64), placeholders=("topk_idx",), is_usual=True
)
MASK = TensorArgument(
    "x_active_mask",
    "(BS,)",
    torch.bool,
    placeholders=("mask",),
    mode="mask",
    other_shape="(BS, K)",
    by_dims=("tokens", "entries"),
)
WEIGHTS = TensorArgument(
    "expert_scales",
    "(BS, K)",
    (torch.float32, *FLOATS),
    read_as=torch.float32,
    placeholders=("topk_weights",),
    mode="weights",
    is_usual=True,
)
ELASTIC = TensorArgument("elastic_info", mode="elastic", on_any_device=True)
WAITS = TensorArgument(
    "performance_info",
    "(EP,)",
    torch.int64,
    placeholders=("performance_info",),
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
TICKET = TensorArgument("comm_cmd_info", "(n,)", torch.int32, of_setup=True)

TENSORS = (
    TensorArgument("x", "(BS, H)", FLOATS, placeholders=("x",), is_usual=True),
    IDS,
    TensorArgument(
        "scales", "(S + M, H)", torch.float32, placeholders=("smooth_scales",), mode="smooth", is_usual=True
    ),
    MASK,
    replace(WEIGHTS, empty_is_none=True),
    ELASTIC,
    WAITS,
    STATS,
    TensorArgument("y", "(BS * (K + S), Hs)", ("x", torch.int8), of_setup=True),
    TICKET,
)

MODES: Modes = {
    "row_format": lambda s: BY_QUANT_MODE.get(s["quant_mode"], AS_THEY_ARE),
    "cumulative": lambda s: s["expert_token_nums_type"] == 0,
    "exchange": lambda s: s["tp_world_size"] == 2,
    "given_ids": lambda s: s["given_ids"],
}

INDEX = Output("expand_idx", "(BS * K,)", torch.int32, "expand_idx")
ROWS = (
    Output("expand_x", "(A * tp, H)", "row", "tokens"),
    Output("dynamic_scales", "(A * tp,)", torch.float32, "scales"),
)
ORIGINS = Output("assist_info_for_combine", "(max(BS * K, 128 * A),)", torch.int32, "origins")
COUNTS = (
    Output("expert_token_nums", "(localE,)", torch.int64, "tokens_per_expert"),
    Output(
        "ep_recv_counts",
        "(EP * localE * tp,)",
        torch.int32,
        "recv_offsets",
        ("expert_scales", "(max(EP * localE * tp, EP * localE + 2 * G * K * servers),)"),
    ),
    Output("tp_recv_counts", "(tp_world_size,)", torch.int32, "exchange_counts"),
    Output("expand_scales", "(0,)", torch.float32, "weights", ("expert_scales", "(A,)")),
)

DISPATCH = Operator(
    "dispatch", 2, DispatchVariant, TENSORS, (*ROWS, ORIGINS, *COUNTS), MODES, unreturned=(INDEX,)
)
DISPATCH_V1 = replace(
    DISPATCH,
    version=1,
    outputs=(*ROWS, INDEX, *COUNTS),
    modes={**MODES, "row_format": lambda s: INT8 if s.is_given("scales") else MODES["row_format"](s)},
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
        Output("y", "(BS * (K + S), W)", "row"),
        INDEX,
        Output("comm_cmd_info", "(16 * (BS * (K + S) + EP * localE),)", torch.int32),
    ),
    unreturned=(),
)
DISPATCH_TEARDOWN = replace(
    DISPATCH, name="dispatch_teardown", outputs=DISPATCH.outputs[:4], unreturned=COUNTS[1:]
)
