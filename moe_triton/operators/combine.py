"""Combine, in both versions, in halves, and with a norm: docs/operators.md, "Outputs"."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.operators.description import Modes, Operator, Output, TensorArgument
from moe_triton.operators.dispatch import ELASTIC, FLOATS, IDS, MASK, TICKET, WAITS, WEIGHTS
from moe_triton.operators.variants import BLOCK_QUANTIZE_MODE, CombineVariant

RESULTS = TensorArgument("expand_x", "(rows, H)", FLOATS, placeholders=("y",))
ORIGINS = TensorArgument(
    "assist_info_for_combine", "(n,)", torch.int32, placeholders=("origins", "expand_idx")
)
ALPHA = TensorArgument(
    "const_expert_alpha_1",
    "(C,)",
    "x",
    placeholders=("alpha1",),
    mode="const_per_element",
    other_shape="(C, H)",
    by_dims=(False, True),
)

TENSORS = (
    RESULTS,
    IDS,
    ORIGINS,
    replace(ORIGINS, name="expand_idx"),
    TensorArgument("ep_send_counts", "(n,)", torch.int32, placeholders=("recv_offsets",)),
    WEIGHTS,
    TensorArgument(
        "tp_send_counts", "(2,)", torch.int32, placeholders=("exchange_counts",), only_with="exchange"
    ),
    MASK,
    TensorArgument(
        "shared_expert_x",
        "(BS, H)",
        "x",
        placeholders=("shared_x",),
        mode="shared_x",
        other_shape="(a, BS // a, H)",
    ),
    TensorArgument("ori_x", "(BS, H)", "x", placeholders=("ori_x",)),
    ALPHA,
    replace(ALPHA, name="const_expert_alpha_2", placeholders=("alpha2",), mode="", dims_of=ALPHA.name),
    TensorArgument("const_expert_v", "(C, H)", "x", placeholders=("const_v",)),
    TensorArgument("residual_x", "(BS, 1, H)", torch.bfloat16, placeholders=("residual",)),
    TensorArgument("gamma", "(H,)", torch.bfloat16, placeholders=("gamma",)),
    ELASTIC,
    WAITS,
    TensorArgument("quant_expand_x", "(n, Hs)", torch.int8, of_setup=True),
    TICKET,
    # Nobody looks at these: the rules refuse all but the first.
    TensorArgument("expand_scales"),
    TensorArgument("activation_scale"),
    TensorArgument("weight_scale"),
    TensorArgument("group_list"),
)

MODES: Modes = {
    "special": lambda s: (s["zero_expert_num"], s["copy_expert_num"], s["const_expert_num"]),
    "block_quantize": lambda s: s["comm_quant_mode"] == BLOCK_QUANTIZE_MODE,
    "exchange": lambda s: s["tp_world_size"] == 2,
    "norm": lambda s: s.operator.name == "combine_add_rms_norm",
}

COMBINE = Operator("combine", 2, CombineVariant, TENSORS, (Output("out", "(BS, H)", "x", "out"),), MODES)
COMBINE_V1 = replace(
    COMBINE,
    version=1,
    tensors=tuple(
        replace(t, shape="(BS * K,)", other_shape="(BS, K)") if t.name == "expand_idx" else t for t in TENSORS
    ),
)
COMBINE_ADD_RMS_NORM = replace(
    COMBINE,
    name="combine_add_rms_norm",
    tensors=(replace(RESULTS, dtype=torch.bfloat16), *TENSORS[1:]),
    outputs=(
        Output("y", "(BS, 1, H)", torch.bfloat16, "normed"),
        Output("rstd", "(BS, 1, 1)", torch.float32, "rstd"),
        Output("x", "(BS, 1, H)", torch.bfloat16, "out"),
    ),
)
COMBINE_SETUP = replace(
    COMBINE,
    name="combine_setup",
    outputs=(
        Output("quant_expand_x", "(rows, Align512(Align32(H) + Align8(H) // 8 * 4))", torch.int8),
        Output("comm_cmd_info", "(16 * (rows + EP),)", torch.int32),
    ),
)
COMBINE_TEARDOWN = replace(COMBINE, name="combine_teardown")
