"""What one operator call asks for, beyond the group's `Config`."""

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
    """Arguments of one call on one rank, as far as rules are about them.

    Tensors appear as whether they were given; their shapes, dtypes and contents are checked where they
    are read. What an operator has no argument for keeps its default.

    Attributes:
        version: of the operator: 1 or 2.
        operator: which one.
        num_tokens: of this rank (BS).
        x_dims: dimensions of x, or of y in combine.
        ids_dims: dimensions of topk_idx.
        global_bs: 0, or tokens of the largest rank times ranks.
        quant_mode: of dispatch: 0 none, 2 dynamic per token.
        comm_quant_mode: of combine: 0 none, 2 int8 in blocks of 8.
        expert_token_nums_type: 0 cumulative, 1 counts.
        expert_shard_type: 0, ranks of shared experts first.
        tp_world_size: tensor-parallel ranks; 0 and 1 mean none.
        tp_rank_id: this rank's place among them.
        rank: this rank's place in the expert-parallel group.
        has_smooth_scales: smooth_scales given.
        has_active_mask: active_mask given, of tokens that there are.
        mask_dims: its dimensions.
        has_topk_weights: topk_weights given.
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
        num_zero_experts: experts that give nothing.
        num_copy_experts: experts that give the token itself.
        num_const_experts: constant experts.
        out_dtype: 0, the dtype of the input.
        group_list_type: 0.
        comm_type: 0, as the scheme does.
        is_of_buffer: whether `EPBuffer` asks: what only torch_npu's functions refuse does not count.
        group: name of the expert-parallel group.
        tp_group: name of the tensor-parallel group.
    """

    version: int = 2
    operator: Operator = "dispatch"
    num_tokens: int
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
    has_smooth_scales: bool = False
    has_active_mask: bool = False
    mask_dims: int = 1
    has_topk_weights: bool = False
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
    num_zero_experts: int = 0
    num_copy_experts: int = 0
    num_const_experts: int = 0
    out_dtype: int = 0
    group_list_type: int = 0
    comm_type: int = 0
    is_of_buffer: bool = False
    group: str
    tp_group: str = ""

    @property
    def is_combine(self) -> bool:
        """Whether it is a combine or a half of one."""
        return self.operator.startswith("combine")

    @property
    def num_special_experts(self) -> int:
        """Zero, copy and constant experts."""
        return self.num_zero_experts + self.num_copy_experts + self.num_const_experts

    def has_variable_batch(self, num_ranks: int) -> bool:
        """Whether global_bs says that ranks have different numbers of tokens, as seen from this rank."""
        return not self.is_of_buffer and self.global_bs > self.num_tokens * num_ranks
