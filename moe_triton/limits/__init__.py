"""The rules on a `Config` and on a call, each with its message: the one table of limits.

Their page is docs/limits.md, "Limits". ``relaxed`` lifts lower bounds that only a real product has, so
that tests and demos can be small; nothing else. ``python -m moe_triton.limits`` prints the table.
"""

from __future__ import annotations

from moe_triton.limits.a3 import A3_RULES
from moe_triton.limits.buffer_size import (
    DEFAULT_MEGABYTES,
    MEGABYTE,
    buffer_megabytes,
    check_buffer_size,
    check_num_bytes,
    check_window_limit,
    needed_buffer_bytes,
    needed_exchange_bytes,
)
from moe_triton.limits.call import Call, Operator
from moe_triton.limits.check import (
    RULE_SETS,
    TORCH_NPU_NAMES,
    call_rules_for,
    check_call,
    check_config,
    check_rules,
    rule_sets_for,
    rules_for,
    scheme_of,
    torch_npu_names,
)
from moe_triton.limits.common import GENERATIONS, MAX_GROUP_NAME
from moe_triton.limits.document import markdown
from moe_triton.limits.rule import CallRule, ConfigRule, Rule, RuleSet

__all__ = [
    "A3_RULES",
    "Call",
    "CallRule",
    "ConfigRule",
    "DEFAULT_MEGABYTES",
    "GENERATIONS",
    "MAX_GROUP_NAME",
    "MEGABYTE",
    "Operator",
    "RULE_SETS",
    "Rule",
    "RuleSet",
    "TORCH_NPU_NAMES",
    "buffer_megabytes",
    "call_rules_for",
    "check_buffer_size",
    "check_call",
    "check_config",
    "check_num_bytes",
    "check_rules",
    "check_window_limit",
    "markdown",
    "needed_buffer_bytes",
    "needed_exchange_bytes",
    "rule_sets_for",
    "rules_for",
    "scheme_of",
    "torch_npu_names",
]
