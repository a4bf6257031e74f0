"""Dispatch and combine as `EPBuffer` spells them: its names of the arguments, and what it gives back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_triton.core.config import Config
from moe_triton.core.row_formats import AS_THEY_ARE
from moe_triton.operators.combine import COMBINE, ORIGINS
from moe_triton.operators.description import Operator, Output, Symbols, TensorArgument
from moe_triton.operators.dispatch import COUNTS, DISPATCH, INDEX, ROWS

TABLES = "tables"
"""The placeholder of what a dispatch keeps for its combine (`moe_triton.schemes.scheme.KeptTables`)."""

NAMES = {
    "expert_ids": "topk_idx",
    "expert_scales": "topk_weights",
    "scales": "smooth_scales",
    "x_active_mask": "active_mask",
    "expand_x": "y",
}
# What combine takes from the handle instead.
OF_HANDLE = {
    "expert_ids": "topk_idx",
    "expand_idx": "expand_idx",
    "assist_info_for_combine": "assist_info",
    "ep_send_counts": "recv_offsets",
    "tp_send_counts": "exchange_counts",
    "x_active_mask": "active_mask",
    "kept_tables": "tables",
}
NOT_TAKEN = {"elastic_info", "comm_cmd_info", "quant_expand_x", "expand_scales", "activation_scale"}
NOT_TAKEN |= {"weight_scale", "group_list", "residual_x", "gamma"}


def attributes_of(
    config: Config,
    rank: int,
    exchange_rank: int | None = None,
    special: tuple[int, int, int] = (0, 0, 0),
    table_words: int = 0,
) -> dict[str, Any]:
    """What all calls of a buffer have for attributes, by torch_npu's names, and its sizes.

    Args:
        config: of the buffer.
        rank: this one.
        exchange_rank: this rank's number among two tensor-parallel ranks, or None.
        special: numbers of zero, copy and constant experts.
        table_words: of the tables that a dispatch keeps for combine.
    """
    return {
        "ep_world_size": config.num_ranks,
        "ep_rank_id": rank,
        "moe_expert_num": config.num_experts,
        "shared_expert_num": config.num_shared_experts,
        "shared_expert_rank_num": config.num_shared_ranks,
        "global_bs": config.num_max_tokens_per_rank * config.num_ranks,
        "tp_world_size": 0 if exchange_rank is None else 2,
        "tp_rank_id": exchange_rank or 0,
        **dict(zip(("zero_expert_num", "copy_expert_num", "const_expert_num"), special, strict=True)),
        "group_ep": "expert-parallel",
        "group_tp": "tensor-parallel",
        "H": config.hidden,
        "K": config.num_topk,
        "table_words": table_words,
    }


def symbols_like(operator: Operator, config: Config, dtype: torch.dtype, **known: Any) -> Symbols:
    """Sizes of a call of a buffer that there are no tensors of yet, from what is known of it."""
    columns = config.hidden, config.num_topk
    likes = {
        argument.name: torch.empty(1, each, dtype=dtype, device="meta")
        for argument, each in zip(operator.tensors[:2], columns, strict=True)
    }
    return Symbols(operator, {"row_format": AS_THEY_ARE, **known, **likes})


OFFSETS = "(EP * localE * tp,)"
ASSIST_INFO = "(3 * A + trailer,)"

DISPATCH_OF_BUFFER = replace(
    DISPATCH,
    tensors=tuple(t for t in DISPATCH.tensors if t.name not in NOT_TAKEN | {"y"}),
    # The last one is large, and so has memory of its own.
    outputs=(
        INDEX,
        Output("assist_info", ASSIST_INFO, torch.int32, "origins"),
        replace(COUNTS[0], name="tokens_per_expert"),
        Output("recv_offsets", OFFSETS, torch.int32, "recv_offsets"),
        replace(COUNTS[2], name="exchange_counts", only_with="exchange"),
        Output("tables", "(table_words,)", torch.int32, TABLES, only_with="keeps_tables"),
        replace(ROWS[1], name="scales", shape="scales_of(A * tp)", only_with="row_format.is_quantized"),
        Output("weights", "(A,)", torch.float32, "weights", only_with="weights"),
        replace(ROWS[0], name="tokens"),
    ),
    modes={
        **DISPATCH.modes,
        "local_bypass": lambda s: s["local_bypass"],
        "keeps_tables": lambda s: s["table_words"] > 0,
    },
    unreturned=(),
    names=NAMES,
)

_OF_COMBINE = {
    "expand_idx": replace(ORIGINS, name="expand_idx", shape="(BS * K,)", placeholders=("expand_idx",)),
    "assist_info_for_combine": replace(ORIGINS, shape=ASSIST_INFO, placeholders=("origins",)),
    "ep_send_counts": replace(ORIGINS, name="ep_send_counts", shape=OFFSETS, placeholders=("recv_offsets",)),
}
COMBINE_OF_BUFFER = replace(
    COMBINE,
    tensors=(
        *(_OF_COMBINE.get(t.name, t) for t in COMBINE.tensors if t.name not in NOT_TAKEN),
        TensorArgument(
            "kept_tables", "(table_words,)", torch.int32, placeholders=(TABLES,), only_with="table_words"
        ),
    ),
    modes={
        **COMBINE.modes,
        "in_place": lambda s: s["in_place"],
        "local_bypass": lambda s: s["local_bypass"],
    },
    names=NAMES | {name: f"handle.{field}" for name, field in OF_HANDLE.items()},
)
