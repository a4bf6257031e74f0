"""The tables of rules as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from moe_triton.limits.buffer_size import DEFAULT_MEGABYTES, FORMULAS
from moe_triton.limits.check import IMPLEMENTED, RULE_SETS, TORCH_NPU_NAMES
from moe_triton.limits.common import PRODUCTS
from moe_triton.limits.rule import CallRule, ConfigRule, RuleSet

HEADER = """\
<!-- Written by `python -m moe_triton.limits > docs/limits.md`. Change the rules, not this page. -->

# Limits

These rules are checked before anything is sent. An error names the argument, its value, the rule and what to
do about it, and carries the status code of the last column: 161001 where something needed is missing, 161002
for a wrong type, dtype, device or group name, 561002 for a wrong shape or number.

Symbols: EP ranks in the group (`ep_world_size`), BS tokens of this rank, H hidden size, K experts per token,
M routed experts (`moe_expert_num`), S shared experts, R ranks that hold them, localE = M / (EP - R) routed
experts per rank, maxBs = `global_bs` / EP, or BS where `global_bs` is 0. In parentheses: the name in
`EPBuffer` and `Config`.

`relaxed=True` allows the sizes of its column, for tests and demos. Everything else stays checked.

The limits of {products} are known. Served today: {served}.
"""

BUFFER_HEADER = """\
## Window memory: HCCL_BUFFSIZE

`HCCL_BUFFSIZE` (in MB of 1048576 bytes, {default} where it is not set) bounds the window of a group. Too
small a value is found before anything is sent, and the message gives the value to set. AlignN(x) is x rounded
up to a multiple of N.

| Scheme | Bytes needed |
|---|---|
"""


def _name(argument: str) -> str:
    npu = TORCH_NPU_NAMES.get(argument)
    return f"`{npu}` (`{argument}`)" if npu else f"`{argument}`"


def _table(rules: tuple[ConfigRule, ...] | tuple[CallRule, ...]) -> Iterator[str]:
    relaxed = any(rule.relaxed for rule in rules)
    yield "| Argument | Limit | With `relaxed` | Code |" if relaxed else "| Argument | Limit | Code |"
    yield "|---|---|---|---|" if relaxed else "|---|---|---|"
    for rule in rules:
        cells = [_name(rule.argument), rule.limit, *([rule.relaxed] if relaxed else []), str(rule.code)]
        yield f"| {' | '.join(cells)} |"


def _section(rule_set: RuleSet) -> Iterator[str]:
    yield f"## {rule_set.title}"
    yield ""
    yield "Sizes:"
    yield ""
    yield from _table(rule_set.config)
    yield ""
    yield "Other arguments of a call:"
    yield ""
    yield from _table(rule_set.call)
    yield ""


def markdown() -> str:
    """The page docs/limits.md."""
    served = "; ".join(f"{product} with {', '.join(schemes)}" for product, schemes in IMPLEMENTED.items())
    lines = [HEADER.format(products=" and ".join(PRODUCTS), served=served)]
    for rule_set in RULE_SETS:
        lines.extend(_section(rule_set))
    rows = "\n".join(f"| {formula.title} | `{formula.text}` |" for formula in FORMULAS.values())
    return "\n".join(lines) + "\n" + BUFFER_HEADER.format(default=DEFAULT_MEGABYTES) + rows + "\n"
