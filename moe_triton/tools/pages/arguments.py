"""What becomes of each argument of each operator, by product and scheme: the one table of it.

Its page is docs/arguments.md, which ``python -m moe_triton.tools.pages arguments`` prints. Tests make every
call that it speaks of.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import moe_triton
from moe_triton import torch_npu_ops
from moe_triton.schemes import SCHEMES, schemes_with
from moe_triton.schemes.choice import between_servers
from moe_triton.tools.markdown import table

Standing = Literal["taken", "checked", "refused", "ignored", "-"]

MEANINGS: dict[Standing, str] = {
    "taken": "the call goes by it",
    "checked": "its shape and dtype have to be right, and what it holds changes nothing",
    "refused": "anything but what stands there where it is left out is an error, before anything is sent",
    "ignored": "nobody looks at it: it may be anything of its type",
    "-": "there is no such call",
}

Scheme = tuple[str, str]
"""Product and ``comm_alg``."""


def _with(feature: str) -> tuple[Scheme, ...]:
    """The schemes that do not refuse a feature, by product."""
    return tuple((product, name) for product in SCHEMES for name in schemes_with(feature, product))


OF_TORCH_NPU, _OF_HALVES = _with("torch_npu"), _with("torch_npu halves")
_EVERY = [(product, name) for product, names in SCHEMES.items() for name in names]
OF_BUFFER = tuple(sorted(_EVERY, key=lambda scheme: scheme not in OF_TORCH_NPU))
# V1 has no ``comm_alg``: it has its product's first scheme, or that which HCCL's switches make the default.
_OF_V1 = [(p, name) for p, names in SCHEMES.items() for name in (next(iter(names)), between_servers(names))]


@dataclass(frozen=True)
class Row:
    """An argument of an operator.

    Attributes:
        standings: what becomes of it, in the order of the operator's schemes.
        why: the source, where it is not simply taken; or what it takes to be.
    """

    standings: tuple[Standing, ...]
    why: str = ""


@dataclass(frozen=True)
class Function:
    """The arguments of one operator.

    Attributes:
        schemes: that it is called with.
        rows: by argument, in the order of the signature.
    """

    schemes: tuple[Scheme, ...]
    rows: Mapping[str, Row]

    def standing(self, argument: str, scheme: Scheme) -> Standing:
        """What becomes of an argument."""
        return self.rows[argument].standings[self.schemes.index(scheme)]


def _rows(names: str, words: str, why: str = "") -> dict[str, Row]:
    """These arguments alike.

    Args:
        names: of the arguments.
        words: one standing for each scheme, by its first letter: t, c, r, i, or - for no call.
        why: see `Row`.
    """
    by_letter: dict[str, Standing] = {word[0]: word for word in MEANINGS}
    return dict.fromkeys(names.split(), Row(tuple(by_letter[letter] for letter in words), why))


_PAIRED = (
    "with `tp_world_size=2` only: published host checks look then only, and frameworks pass others' values"
)
_NO_SHARED_RANKS = (
    "A2 and `hierarchy` have no ranks of shared experts: `shared_expert_num` is 0 or 1, and means none"
)
_NO_SPECIAL = "`hierarchy` has no special experts"
_NO_CONST = "A2 and `hierarchy` have no constant experts"
_SUMMED = "A2 and `hierarchy` take no shared experts"
_RESERVED = "the original reserves it and computes nothing with it"
_ONE_VALUE = "only the default is defined for these products"
_OF_950 = "only Ascend 950 has formats to choose from"
_NO_SCALES = "With `hierarchy` a row goes once to each server, and one serves all experts there"
_SCALES = f"with `quant_mode=2`; with 0 refused, as in published host checks. {_NO_SCALES}"
_ELASTIC = "`fullmesh_v2`, `hierarchy` and A2 have no lost ranks in the original"
_WAITS = "`hierarchy` waits for ranks through others"
_NO_MASK = "A3's first version has none"
_LEFT = "dispatch's, which the CPU back end compares"
_WITH_COPY = "where there are copy or constant experts; otherwise checked"
_WITH_CONST = "where there are constant experts"
_ALPHAS_AND_V = "const_expert_alpha_1 const_expert_alpha_2 const_expert_v"
_BY_IDS = (
    "A2 finds results by the ids, and has its number of words checked as host checks do; A3's `hierarchy` "
    "finds them by what dispatch has kept"
)

# What most operators have alike.
_COMMON = {
    **_rows("group_ep ep_world_size ep_rank_id moe_expert_num global_bs comm_alg", "ttttt"),
    **_rows("group_tp tp_rank_id", "tiiii", _PAIRED),
    **_rows("tp_world_size", "trrrr", "1 is 0. A2, `fullmesh_v2` and `hierarchy` have no tensor parallelism"),
    **_rows("expert_shard_type", "rrrrr", "ranks of shared experts come first"),
    **_rows("shared_expert_num shared_expert_rank_num", "ttrrr", _NO_SHARED_RANKS),
    **_rows("zero_expert_num copy_expert_num", "ttrtr", _NO_SPECIAL),
    **_rows("const_expert_num", "ttrrr", _NO_CONST),
    **_rows("elastic_info", "trrrr", _ELASTIC),
    **_rows("performance_info", "ttrtr", _WAITS),
}
_DISPATCH = {
    **_COMMON,
    **_rows("x expert_ids expert_scales x_active_mask quant_mode expert_token_nums_type", "ttttt"),
    **_rows("scales", "ttrtr", _SCALES),
    **_rows("y_dtype x_dtype scales_dtype", "rrrrr", _OF_950),
}
_COMBINE = {
    **_COMMON,
    **_rows("expand_x expert_ids ep_send_counts expert_scales residual_x gamma norm_eps", "ttttt"),
    **_rows("assist_info_for_combine expand_idx", "ttccc", _BY_IDS),
    **_rows("tp_send_counts", "tiiii", _PAIRED),
    **_rows("x_active_mask", "ttttt", _LEFT),
    **_rows("expand_scales", "iiiii", "weights are `expert_scales`; frameworks pass dispatch's output on"),
    **_rows("shared_expert_x", "ttrrr", _SUMMED),
    **_rows("ori_x", "ttrtr", f"{_WITH_COPY}. {_NO_SPECIAL}"),
    **_rows(_ALPHAS_AND_V, "ttrrr", f"{_WITH_CONST}. {_NO_CONST}"),
    **_rows("comm_quant_mode", "tttrt", "A2 quantises results in `hierarchy` only"),
    **_rows("activation_scale weight_scale group_list group_list_type", "rrrrr", _RESERVED),
    **_rows("out_dtype", "rrrrr", "the result has the dtype of the input"),
}


def _only(schemes: Collection[Scheme], rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of an operator that there is with these schemes of torch_npu's alone."""
    return {
        name: Row(
            tuple(
                standing if scheme in schemes else "-"
                for scheme, standing in zip(OF_TORCH_NPU, row.standings, strict=True)
            ),
            row.why,
        )
        for name, row in rows.items()
    }


_VERSION_1 = _rows("shared_expert_num", "r--rr", "V1 has one shared expert, or none where no rank holds it")
_HALF = _rows("comm_type", "rr---", "2 is Ascend 950's; 0 is as the scheme does")
_OF_SETUP = "the library's own: it has to be what setup returned"
_SEEN_BY_SETUP = "setup has sent it"

_OF_ROUNDS = "num_max_tokens_per_rank num_recv_tokens layout expert_alignment"
# Of each operator the rows of its arguments; a later one of an argument counts before an earlier one.
ROWS: dict[str, Mapping[str, Row]] = {
    "npu_moe_distribute_dispatch": {
        **_only(_OF_V1, _DISPATCH),
        **_VERSION_1,
        **_rows("x_active_mask", "r--tt", _NO_MASK),
        **_rows("scales", "t--tr", f"rows are then quantised. {_NO_SCALES}"),
    },
    "npu_moe_distribute_dispatch_v2": _DISPATCH,
    "npu_moe_distribute_combine": {
        **_only(_OF_V1, _COMBINE),
        **_VERSION_1,
        **_rows("x_active_mask", "r--tt", f"{_NO_MASK}. {_LEFT}"),
        **_rows("shared_expert_x", "r--rr", "the original's first version accepts it and does not add it"),
    },
    "npu_moe_distribute_combine_v2": _COMBINE,
    "npu_moe_distribute_combine_add_rms_norm": {**_COMBINE, **_rows("x_active_mask", "ttttt")},
    "npu_moe_distribute_dispatch_setup": {**_only(_OF_HALVES, _DISPATCH), **_HALF},
    "npu_moe_distribute_dispatch_teardown": {
        **_only(_OF_HALVES, _DISPATCH),
        **_HALF,
        **_rows("x expert_ids", "cc---", _SEEN_BY_SETUP),
        **_rows("y", "cc---", _OF_SETUP),
        **_rows("comm_cmd_info", "tt---", _OF_SETUP),
    },
    "npu_moe_distribute_combine_setup": {
        **_only(_OF_HALVES, _COMBINE),
        **_HALF,
        **_rows("expert_ids", "cc---", "rows go back by their origins"),
    },
    "npu_moe_distribute_combine_teardown": {
        **_only(_OF_HALVES, _COMBINE),
        **_HALF,
        **_rows("expand_x", "cc---", _SEEN_BY_SETUP),
        **_rows("quant_expand_x", "cc---", _OF_SETUP),
        **_rows("expand_idx", "cc---", "results lie in the order of the ids"),
        **_rows("comm_cmd_info", "tt---", _OF_SETUP),
    },
    "EPBuffer.dispatch": {
        **_rows("x topk_idx topk_weights cumulative_local_expert_recv_stats quantize", "tttttt"),
        **_rows("smooth_scales", "ttrtrt", f"with `quantize`; without, refused. {_NO_SCALES}"),
        **_rows("active_mask", "tttttr", "`direct` has none"),
        **_rows("performance_info", "ttrtrr", f"{_WAITS}; `direct` has none"),
        **_rows("eplb_table", "tttttt"),
        **_rows("eplb_mode", "tttttt", "with `eplb_table`; without, refused"),
        **_rows("handle", "tttttt"),
        **_rows(_OF_ROUNDS, "tttttr", "rows of `direct` arrive where a window has room for one round"),
        **_rows("do_zero_padding", "tttttt", "of the gaps that `layout` and `expert_alignment` leave"),
        **_rows(
            "do_expand",
            "ttrtrr",
            "servers of `hierarchy` sum results of single experts; `direct` places them",
        ),
        **_rows("out", "tttttr", "rows of `direct` arrive in the window"),
        **_rows(
            "wait", "ttrtrr", "a relay passes others' rows on inside its own call; `direct` has no halves"
        ),
    },
    "EPBuffer.combine": {
        **_rows("y handle topk_weights out", "tttttt"),
        **_rows("comm_quantize", "tttrtr", "A2 quantises results in `hierarchy` only; `direct` has none"),
        **_rows("shared_expert_x", "ttrrrr", f"{_SUMMED}; `direct` has none"),
        **_rows("ori_x", "ttrtrr", f"{_WITH_COPY}. {_NO_SPECIAL}, nor has `direct`"),
        **_rows(_ALPHAS_AND_V, "ttrrrr", f"{_WITH_CONST}. {_NO_CONST}, nor has `direct`"),
        **_rows("performance_info", "ttrtrr", f"{_WAITS}; `direct` has none"),
        **_rows("wait", "ttrtrr", "a relay sums inside its own call; `direct` has no halves"),
    },
    "npu_moe_update_expert": {
        **_rows("expert_ids eplb_table balance_mode", "ttt--"),
        **_rows("expert_scales pruning_threshold", "ttt--", "both or neither"),
        **_rows("active_mask", "ttt--", "with `expert_scales` and `pruning_threshold`; without, refused"),
        **_rows("local_rank_id world_size", "ttt--", "with `balance_mode` 0"),
    },
    "_npu_distribute_barrier": {
        **_rows(
            "x_ref", "iiiii", "it orders what uses it behind the barrier in a traced graph, as in torch_npu"
        ),
        **_rows("group world_size time_out elastic_info", "ttttt"),
    },
    "npu_moe_distribute_buffer_reset": _rows("elastic_info group_ep ep_world_size need_sync", "ttttt"),
}


def _function(name: str, rows: Mapping[str, Row]) -> Function:
    """An operator, with its arguments in the order of its signature."""
    of_buffer = name.startswith("EPBuffer.")
    operator = attrgetter(name)(moe_triton if of_buffer else torch_npu_ops)
    arguments = [name for name in inspect.signature(operator).parameters if name != "self"]
    return Function(OF_BUFFER if of_buffer else OF_TORCH_NPU, {name: rows[name] for name in arguments})


TABLE = {name: _function(name, rows) for name, rows in ROWS.items()}
"""By operator."""

_HEADER = """\
<!-- Written by `python -m moe_triton.tools.pages arguments`. Change the table, not this. -->

# Arguments, one by one

What becomes of every argument of every operator, by product and `comm_alg`. No option is accepted and left
without effect but those that say so here, with the reason.

{meanings}

Values have limits besides ([Limits](limits.md)). Halves exist on A3 only, of its two fullmesh schemes, and V1
has one scheme there. A3's `hierarchy` takes a mask of tokens, and `global_bs` only where all ranks have as
many tokens. A group inside one server has no `hierarchy` on A2: what is asked for under that name is
`fullmesh`. With `configure(generation="v3")` or `"v4"` more is refused, as those pages have it.
"""


def _section(name: str, function: Function) -> str:
    columns = ["Argument", *(f"{product} `{scheme}`" for product, scheme in function.schemes), ""]
    rows = [(f"`{argument}`", *row.standings, row.why) for argument, row in function.rows.items()]
    return f"## `{name}`\n\n{table(columns, rows)}\n"


def markdown() -> str:
    """The page docs/arguments.md."""
    meanings = "\n".join(f"- **{word}**: {meaning}." for word, meaning in MEANINGS.items() if word != "-")
    return "\n".join([_HEADER.format(meanings=meanings), *(_section(*each) for each in TABLE.items())])
