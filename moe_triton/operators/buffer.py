"""Dispatch and combine of an `EPBuffer`: the arguments that it takes, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moe_triton.core.config import Config
from moe_triton.core.row_formats import AS_THEY_ARE
from moe_triton.operators.combine import COMBINE
from moe_triton.operators.description import Operator, Output, Symbols, TensorArgument
from moe_triton.operators.dispatch import COUNTS, DISPATCH, INDEX, ROWS

TABLES = "tables"
"""The placeholder of what a dispatch keeps for its combine (`moe_triton.schemes.scheme.KeptTables`)."""
DISPATCHED = "dispatched"
"""What no kernel reads: the number of a combine's dispatch."""

# What combine takes from the handle: fields of it.
OF_HANDLE = "topk_idx", "expand_idx", "assist_info", "recv_offsets", "exchange_counts", "active_mask", TABLES
NOT_TAKEN = {"elastic_info", "packed_x", "comm_cmd_info", "quant_expand_x", "expand_scales", "residual_x"}
NOT_TAKEN |= {"gamma", "activation_scale", "weight_scale", "group_list"}


def attributes_of(
    config: Config,
    rank: int,
    exchange_rank: int | None = None,
    special: tuple[int, int, int] = (0, 0, 0),
    table_words: int = 0,
) -> dict[str, Any]:
    """What all calls of a buffer have for attributes, and its sizes.

    Args:
        config: of the buffer.
        rank: this one.
        exchange_rank: this rank's number among two tensor-parallel ranks, or None.
        special: numbers of zero, copy and constant experts.
        table_words: of the tables that a dispatch keeps for combine.
    """
    names = "num_ranks", "num_experts", "num_shared_experts", "num_shared_ranks"
    by_rank: dict[str, Any] = {}
    if config.experts_per_rank is not None:
        by_rank = {"localE": config.experts_on(rank), "A": config.receive_capacity(rank)}
    return {
        **{name: getattr(config, name) for name in names},
        **dict(zip(("num_zero_experts", "num_copy_experts", "num_const_experts"), special, strict=True)),
        "rank": rank,
        "global_bs": config.num_max_tokens_per_rank * config.num_ranks,
        "tp_world_size": 0 if exchange_rank is None else 2,
        "tp_rank_id": exchange_rank or 0,
        "group": "expert-parallel",
        "tp_group": "tensor-parallel",
        "H": config.hidden,
        "K": config.num_topk,
        "table_words": table_words,
        **by_rank,
    }


def symbols_like(operator: Operator, config: Config, dtype: torch.dtype, **known: Any) -> Symbols:
    """Sizes of a call of a buffer that there are no tensors of yet, from what is known of it."""
    columns = config.hidden, config.num_topk
    likes = {
        argument.name: torch.empty(1, each, dtype=dtype, device="meta")
        for argument, each in zip(operator.tensors[:2], columns, strict=True)
    }
    return Symbols(operator, {"row_format": AS_THEY_ARE, **known, **likes})


def _mode(name: str) -> Callable[[Symbols], bool]:
    """What a call of the buffer says of itself, no where it says nothing."""
    return lambda s: bool(s.get(f"is_{name}"))


OFFSETS = "(EP * localE * tp,)"
ASSIST_INFO = "(3 * A + trailer,)"

DISPATCH_OF_BUFFER = replace(
    DISPATCH,
    tensors=tuple(t for t in DISPATCH.tensors if t.name not in NOT_TAKEN),
    # The last one is large, and so has memory of its own.
    outputs=(
        INDEX,
        Output("assist_info", ASSIST_INFO, torch.int32, "origins"),
        COUNTS[0],
        Output("recv_offsets", OFFSETS, torch.int32),
        replace(COUNTS[2], only_with="exchange"),
        Output(TABLES, "(table_words,)", torch.int32, only_with="keeps_tables"),
        Output("results_idx", "(BS, K)", torch.int32, only_with="per_rank"),
        Output("local_topk_idx", "(received, K)", torch.int32, only_with="per_rank"),
        Output("local_topk_weights", "(received, K)", torch.float32, only_with="local_weights"),
        replace(ROWS[1], shape="scales_of(received * tp)", only_with="row_format.is_quantized"),
        Output("weights", "(A,)", torch.float32, only_with="row_weights"),
        replace(ROWS[0], shape="(received * tp, H)"),
    ),
    modes={
        **DISPATCH.modes,
        "local_bypass": lambda s: s["local_bypass"],
        "per_rank": lambda s: s["per_rank"],
        "keeps_tables": lambda s: s["table_words"] > 0,
        **{name: _mode(name) for name in ("routed", "placed")},
        "announced": lambda s: s.get("is_announced") or 0,
    },
    unreturned=(),
)

_OF_COMBINE = {
    "expand_idx": TensorArgument("expand_idx", "(BS * K,)", torch.int32),
    "origins": TensorArgument("assist_info", ASSIST_INFO, torch.int32, placeholders=("origins",)),
    "recv_offsets": TensorArgument("recv_offsets", OFFSETS, torch.int32),
}
COMBINE_OF_BUFFER = replace(
    COMBINE,
    tensors=(
        *(_OF_COMBINE.get(t.name, t) for t in COMBINE.tensors if t.name not in NOT_TAKEN),
        TensorArgument(TABLES, "(table_words,)", torch.int32, only_with="table_words"),
    ),
    modes={
        **COMBINE.modes,
        "in_place": lambda s: s["in_place"],
        "local_bypass": lambda s: s["local_bypass"],
        "placed": _mode("placed"),
    },
    names={field: f"handle.{field}" for field in OF_HANDLE},
)
