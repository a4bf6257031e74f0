"""What one operator call asks for, beyond the group's `Config`, and what its caller calls that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operator = Literal[
    "dispatch",
    "combine",
    "combine_add_rms_norm",
    "dispatch_setup",
    "dispatch_teardown",
    "combine_setup",
    "combine_teardown",
]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one torch_npu-shaped call on one rank, as far as rules are about them.

    Tensors appear as whether they were given; their shapes, dtypes and contents are checked where they
    are read. What an operator has no argument for keeps its default.

    Attributes:
        version: of the operator: 1 or 2.
        operator: which one.
        batch: tokens of this rank (BS).
        x_dims: dimensions of x, or of expand_x in combine.
        ids_dims: dimensions of expert_ids.
        global_bs: 0, or tokens of the largest rank times ranks.
        quant_mode: of dispatch: 0 none, 2 dynamic per token.
        comm_quant_mode: of combine: 0 none, 2 int8 in blocks of 8.
        expert_token_nums_type: 0 cumulative, 1 counts.
        expert_shard_type: 0, ranks of shared experts first.
        tp_world_size: tensor-parallel ranks; 0 and 1 mean none.
        tp_rank_id: this rank's place among them.
        rank: this rank's place in the expert-parallel group (ep_rank_id).
        has_scales: scales given.
        has_mask: x_active_mask given, of tokens that there are.
        mask_dims: its dimensions.
        has_expert_scales: expert_scales given.
        has_elastic_info: elastic_info given.
        has_shared_expert_x: shared_expert_x given.
        has_ori_x: ori_x given.
        has_const_args: const_expert_alpha_1, const_expert_alpha_2 and const_expert_v all given.
        has_activation_scale: activation_scale given.
        has_weight_scale: weight_scale given.
        has_group_list: group_list given.
        has_y_dtype: y_dtype given.
        has_x_dtype: x_dtype given.
        has_scales_dtype: scales_dtype given.
        num_zero: zero experts.
        num_copy: copy experts.
        num_const: constant experts.
        out_dtype: 0, the dtype of the input.
        group_list_type: 0.
        comm_type: 0, as the scheme does.
        is_of_buffer: whether `EPBuffer` asks: what only torch_npu's functions refuse does not count.
        group_ep: name of the expert-parallel group.
        group_tp: name of the tensor-parallel group.
    """

    version: int = 2
    operator: Operator = "dispatch"
    batch: int
    x_dims: int = 2
    ids_dims: int = 2
    global_bs: int = 0
    quant_mode: int = 0
    comm_quant_mode: int = 0
    expert_token_nums_type: int = 1
    expert_shard_type: int = 0
    tp_world_size: int = 0
    tp_rank_id: int = 0
    rank: int = 0
    has_scales: bool = False
    has_mask: bool = False
    mask_dims: int = 1
    has_expert_scales: bool = False
    has_elastic_info: bool = False
    has_shared_expert_x: bool = False
    has_ori_x: bool = False
    has_const_args: bool = False
    has_activation_scale: bool = False
    has_weight_scale: bool = False
    has_group_list: bool = False
    has_y_dtype: bool = False
    has_x_dtype: bool = False
    has_scales_dtype: bool = False
    num_zero: int = 0
    num_copy: int = 0
    num_const: int = 0
    out_dtype: int = 0
    group_list_type: int = 0
    comm_type: int = 0
    is_of_buffer: bool = False
    group_ep: str
    group_tp: str = ""

    @property
    def is_combine(self) -> bool:
        """Whether it is a combine or a half of one."""
        return self.operator.startswith("combine")

    def has_variable_batch(self, num_ranks: int) -> bool:
        """Whether global_bs says that ranks have different numbers of tokens, as seen from this rank."""
        return not self.is_of_buffer and self.global_bs > self.batch * num_ranks


# What torch_npu calls the fields of a `Config` that it has an argument for.
TORCH_NPU_NAMES: dict[str, str] = {
    "num_ranks": "ep_world_size",
    "num_max_tokens_per_rank": "expert_ids.shape[0]",
    "hidden": "x.shape[1]",
    "num_topk": "expert_ids.shape[1]",
    "num_experts": "moe_expert_num",
    "num_shared_experts": "shared_expert_num",
    "num_shared_ranks": "shared_expert_rank_num",
    "num_special_experts": "zero_expert_num + copy_expert_num + const_expert_num",
}


def torch_npu_names(call: Call) -> dict[str, str]:
    """What the caller of this call knows the fields of a `Config` as, for `ArgumentError.renamed`."""
    names = dict(TORCH_NPU_NAMES)
    if call.is_combine:
        names["hidden"] = "expand_x.shape[1]"
    if call.global_bs:
        names["num_max_tokens_per_rank"] = "global_bs / ep_world_size"
    return names
