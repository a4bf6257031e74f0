"""Combine, in both versions, in halves, and with a norm: docs/operators.md, "Outputs"."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.operators.description import Modes, Operator, Output, TensorArgument
from moe_triton.operators.dispatch import ELASTIC, FLOATS, IDS, MASK, TICKET, WAITS, WEIGHTS
from moe_triton.operators.variants import BLOCK_QUANTIZE_MODE, CombineVariant

RESULTS = TensorArgument("y", "(rows, H)", FLOATS)
ORIGINS = TensorArgument("origins", "(n,)", torch.int32, placeholders=("origins", "expand_idx"))
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
    TensorArgument("recv_offsets", "(n,)", torch.int32),
    WEIGHTS,
    TensorArgument("exchange_counts", "(2,)", torch.int32, only_with="exchange"),
    MASK,
    TensorArgument(
        "shared_expert_x",
        "(BS, H)",
        "x",
        placeholders=("shared_x",),
        mode="shared_x",
        other_shape="(a, BS // a, H)",
    ),
    TensorArgument("ori_x", "(BS, H)", "x"),
    ALPHA,
    replace(ALPHA, name="const_expert_alpha_2", placeholders=("alpha2",), mode="", dims_of=ALPHA.name),
    TensorArgument("const_expert_v", "(C, H)", "x", placeholders=("const_v",)),
    TensorArgument("residual_x", "(BS, 1, H)", torch.bfloat16, placeholders=("residual",)),
    TensorArgument("gamma", "(H,)", torch.bfloat16),
    ELASTIC,
    WAITS,
    TensorArgument("quant_expand_x", "(n, Hs)", torch.int8, placeholders=(), of_setup=True),
    TICKET,
    # Nobody looks at these: the rules refuse all but the first.
    *(
        TensorArgument(name, placeholders=())
        for name in ("expand_scales", "activation_scale", "weight_scale", "group_list")
    ),
)

MODES: Modes = {
    "special": lambda s: tuple(s[f"num_{kind}_experts"] for kind in ("zero", "copy", "const")),
    "block_quantize": lambda s: s["comm_quant_mode"] == BLOCK_QUANTIZE_MODE,
    "exchange": lambda s: s["tp_world_size"] == 2,
    "norm": lambda s: s.operator.name == "combine_add_rms_norm",
}

COMBINE = Operator("combine", 2, CombineVariant, TENSORS, (Output("out", "(BS, H)", "x"),), MODES)
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
        Output("normed", "(BS, 1, H)", torch.bfloat16),
        Output("rstd", "(BS, 1, 1)", torch.float32),
        Output("out", "(BS, 1, H)", torch.bfloat16),
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
