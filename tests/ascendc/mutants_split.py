"""Wrong kernels that share the rows badly among their blocks."""

from __future__ import annotations

from .library import Patch
from .mutants import MUTANT_TIMEOUT_US, SEND_PLAN, Mutant, case_of, without
from .split import SplitCase

_SHARES = SplitCase(
    tokens=(6, 1, 1), topk=8, experts_per_rank=4, shared=(1, 1), blocks=6, timeout_us=MUTANT_TIMEOUT_US
)

SPLIT_MUTANTS = (
    Mutant(
        "whole blocks for shared experts at any number of blocks",
        (
            Patch(
                SEND_PLAN,
                "        const int64_t routed = args_->num_tokens * args_->topk;\n",
                "        const int64_t blocks = blocks_.number;\n"
                "        int64_t own = (blocks * num_shared_ + results / 2) / results;\n"
                "        own = own < 1 ? 1 : Smaller(own, blocks - 1);\n"
                "        const int64_t block = blocks_.index;\n"
                "        if (block < blocks - own) {\n"
                "            Begin({0, args_->topk, SplitEvenly(args_->num_tokens * args_->topk, block, "
                "blocks - own)});\n"
                "        } else {\n"
                "            Begin({args_->topk, num_shared_, SplitEvenly(args_->num_tokens * num_shared_, "
                "block - (blocks - own), own)});\n"
                "        }\n"
                "        return;\n"
                "        const int64_t routed = args_->num_tokens * args_->topk;\n",
            ),
        ),
        _SHARES,
    ),
    Mutant(
        "a share of the experts instead of the results",
        (
            Patch(
                SEND_PLAN,
                "blocks_.ShareOf(args_->num_tokens * results)",
                "Share{0, args_->num_tokens * results}",
            ),
            Patch(
                SEND_PLAN,
                "id >= args_->num_experts) {",
                "id >= args_->num_experts || id % blocks_.number != blocks_.index) {",
            ),
        ),
        SplitCase(
            tokens=(7, 1), topk=3, experts_per_rank=8, skewed=True, blocks=12, timeout_us=MUTANT_TIMEOUT_US
        ),
    ),
    Mutant(
        "no shared results from the block that has both kinds",
        (
            Patch(
                SEND_PLAN,
                "        Begin(shared_task_);\n",
                "        if (task_.results.first < task_.results.last) {\n"
                "            return false;\n        }\n"
                "        Begin(shared_task_);\n",
            ),
        ),
        _SHARES,
    ),
    Mutant(
        "routed results of the first blocks twice",
        (
            Patch(
                SEND_PLAN, "Begin({0, args_->topk, {Smaller(share.first, routed)", "Begin({0, args_->topk, {0"
            ),
        ),
        _SHARES,
    ),
    Mutant(
        "shared results by the tables of routed ones",
        (without(SEND_PLAN, "        tables_end_ = 0;\n"),),
        case_of(tokens=(4, 3, 4), shared=(1, 1), hidden=64),
    ),
)
