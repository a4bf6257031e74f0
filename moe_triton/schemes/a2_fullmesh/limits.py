"""Limits of A2's fullmesh, besides those of all that A2 has, and its published formula."""

from __future__ import annotations

from moe_triton.core.config import Config
from moe_triton.core.hccl import MEGABYTE
from moe_triton.limits.common import experts_per_rank, scales_only_quantized, topk_of_experts
from moe_triton.limits.formula import ITEM_BYTES, Formula
from moe_triton.limits.rule import CHOSEN, ONLY_V3, ONLY_V4, SINCE_V4, CallRule, Rule, RuleSet, only
from moe_triton.schemes.common.a2_limits import Sizes, most_of, ranks, ranks_of_host_checks, servers

MAX_LOCAL_EXPERTS = 24

_V3 = Sizes((16, 32, 64, 128, 192, 256), 256, 7168, 512)
_V4 = Sizes((*range(2, 9), 16, 32, 64, 128, 192, 256, 384), 256, 10240, 1024)
_RANKS = ranks_of_host_checks(1, 384)

_local_experts = Rule[[Config]](
    "num_experts",
    f"at most {MAX_LOCAL_EXPERTS} per rank",
    lambda c: c.num_local_experts <= MAX_LOCAL_EXPERTS,
    lambda c: f"a rank holds at most {MAX_LOCAL_EXPERTS} experts, and it would hold {c.num_local_experts}",
    "Use more ranks, fewer experts, or hierarchy between servers.",
)

_CALL: tuple[CallRule, ...] = (
    only(
        "comm_quant_mode",
        (0,),
        "A2 quantises results with hierarchy only",
        "Leave it out, or use hierarchy between servers.",
    ),
)

_ALIKE = servers, topk_of_experts, experts_per_rank
_OF_PAGES = ranks(_V3, ONLY_V3), ranks(_V4, ONLY_V4), *most_of(_V3, ONLY_V3), *most_of(_V4, SINCE_V4)
RULES = {
    1: RuleSet(
        "A2, V1, fullmesh", (_RANKS, ranks(_V3, CHOSEN), *most_of(_V3), *_ALIKE, _local_experts), _CALL
    ),
    # V1 quantises wherever it is given scales.
    2: RuleSet(
        "A2, V2, fullmesh",
        (_RANKS, *_OF_PAGES, *_ALIKE, _local_experts.of(ONLY_V3)),
        (*_CALL, scales_only_quantized),
    ),
}


def _needed(c: Config) -> int:
    rows = c.num_max_tokens_per_rank * c.num_ranks * min(c.num_local_experts, c.num_topk)
    return 2 * (rows * c.hidden * ITEM_BYTES + 2 * MEGABYTE)


# It leaves out what goes with a row (a scale and a stamp of 32 bytes each), which the 2 MB of a zone cover in
# all but large groups.
_FORMULA = Formula("A2, fullmesh", "2 * (maxBs * EP * min(localE, K) * H * 2 + 2 MB)", _needed)
FORMULAS = {1: (_FORMULA,), 2: (_FORMULA,)}
