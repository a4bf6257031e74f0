"""The tables of rules as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable

from moe_triton.core.hccl import DEFAULT_MEGABYTES
from moe_triton.limits.common import PRODUCTS
from moe_triton.limits.formula import Formula
from moe_triton.limits.rule import EITHER, CallRule, ConfigRule, Generations, RuleSet
from moe_triton.schemes import SCHEMES, class_at
from moe_triton.schemes.buffer_size import EXCHANGE_FORMULA
from moe_triton.schemes.rules import rule_sets
from moe_triton.tools.markdown import table
from moe_triton.torch_npu_ops.names import NAMES, SIZES

HEADER = """\
<!-- Written by `python -m moe_triton.tools.pages limits`. Change the rules, not this page. -->

# Limits

These rules are checked before anything is sent. An error names the argument, its value, the rule and what to
do about it, and carries the status code of the last column: 161001 where something needed is missing, or the
name of the group is empty or too long; 161002 for a wrong type, dtype, device or group; 561002 for a wrong
shape or number.

Symbols: EP ranks in the group (`ep_world_size`), BS tokens of this rank, H hidden size, K experts per token,
M routed experts (`moe_expert_num`), S shared experts, R ranks that hold them, localE = M / (EP - R) routed
experts per rank, maxBs = `global_bs` / EP, or BS where `global_bs` is 0. In parentheses: the name in
`EPBuffer` and `Config`.

`relaxed=True` allows the sizes of its column, for tests and demos. `EPBuffer` takes those of its own column
where it has one, relaxed or not: what the products' operators are published to take does not bound it.
Everything else stays checked.

Two **generations** of these limits are published: "v3", those of the pages of
`aclnnMoeDistributeDispatchV3` as they first were, and "v4", those of today's pages of
`aclnnMoeDistributeDispatchV4`. `configure(generation="v3")` and `Config(generation="v3")` choose one. The
column `generation` says for which choices a rule holds; "none" is none chosen, which accepts what either
accepts, rule by rule. Where the column is missing or empty, a rule holds for all. V1 and V2 are versions of
the operators and have nothing to do with it.

The limits of {products} are known. Served today: {served}.
"""

BUFFER_HEADER = """\
## Window memory: HCCL_BUFFSIZE

`HCCL_BUFFSIZE` (in MB of 1048576 bytes, {default} where it is not set) bounds the window of a group. Too
small a value is found before anything is sent, and the message gives the value to set. AlignN(x) is x rounded
up to a multiple of N; A is what a rank can receive at most. Where no `generation` is chosen and there are two
formulas, the smaller result counts. On A3 a window takes these bytes, and a little over a megabyte besides,
but with hierarchy, whose window has two zones of every region ([differences](differences.md#how-it-runs));
that of an `EPBuffer` has the tables of `do_expand=False`, too
([layouts](layouts.md#where-it-costs-a-copy)), and some kilobytes for
[calls in rounds](protocol.md#rounds-of-one-call).
On A2 it takes what its blocks need: mostly less, and in large groups more by up to 64 bytes a row, which the
formula leaves out. The value to set covers both.
"""


def _name(argument: str, is_of_call: bool) -> str:
    """An argument as torch_npu's callers know it, and a field of `Config` by its own name too."""
    npu = (NAMES | SIZES).get(argument, argument)
    return f"`{npu}`" if is_of_call or npu == argument else f"`{npu}` (`{argument}`)"


def _generations(chosen: Generations) -> str:
    """For which generations something holds, as a cell; empty for all."""
    return "" if chosen == EITHER else ", ".join(name or "none" for name in chosen)


def _table(rules: tuple[ConfigRule, ...] | tuple[CallRule, ...], is_of_call: bool) -> str:
    """A column that would be empty is left out."""
    columns = {
        "Argument": [_name(rule.argument, is_of_call) for rule in rules],
        "Limit": [rule.limit for rule in rules],
        "With `relaxed`": [rule.relaxed for rule in rules],
        "`EPBuffer`": [rule.of_buffer for rule in rules],
        "`generation`": [_generations(rule.generations) for rule in rules],
        "Code": [str(rule.code) for rule in rules],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return table(shown, zip(*shown.values(), strict=True))


def _section(rule_set: RuleSet) -> str:
    return (
        f"## {rule_set.title}\n\nSizes:\n\n{_table(rule_set.config, False)}\n\n"
        f"Other arguments of a call:\n\n{_table(rule_set.call, True)}\n"
    )


def _formulas() -> Iterable[Formula]:
    """By product, with those that hold for all generations first."""
    formulas: list[Formula] = []
    for schemes in SCHEMES.values():
        by_version = [class_at(place).formulas for place in schemes.values()]
        of_product = [f for version in (2, 1) for each in by_version for f in each.get(version, ())]
        formulas += sorted(of_product, key=lambda f: f.generations != EITHER)
    return dict.fromkeys([*formulas, EXCHANGE_FORMULA])


def markdown() -> str:
    """The page docs/limits.md."""
    served = "; ".join(f"{product} with {', '.join(schemes)}" for product, schemes in SCHEMES.items())
    formulas = [(f.title, f"`{f.text}`", _generations(f.generations)) for f in _formulas()]
    parts = [
        HEADER.format(products=" and ".join(PRODUCTS), served=served),
        *map(_section, rule_sets()),
        BUFFER_HEADER.format(default=DEFAULT_MEGABYTES),
        table(("Window", "Bytes needed", "`generation`"), formulas),
    ]
    return "\n".join(parts) + "\n"
