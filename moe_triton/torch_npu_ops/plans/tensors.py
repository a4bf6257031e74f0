"""The tensors of a combine."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class CombineTensors(NamedTuple):
    """The tensor arguments of a combine of any kind, in the order of `CombineAttributes`.

    Attributes:
        routes: assist_info_for_combine or expand_idx, whichever the function has.
        send_counts: ep_send_counts.
    """

    expand_x: Tensor
    expert_ids: Tensor
    routes: Tensor
    send_counts: Tensor | None = None
    expert_scales: Tensor | None = None
    tp_send_counts: Tensor | None = None
    x_active_mask: Tensor | None = None
    shared_expert_x: Tensor | None = None
    ori_x: Tensor | None = None
    const_expert_alpha_1: Tensor | None = None
    const_expert_alpha_2: Tensor | None = None
    const_expert_v: Tensor | None = None
    residual_x: Tensor | None = None
    gamma: Tensor | None = None
    performance_info: Tensor | None = None
    elastic_info: Tensor | None = None


# Which hole of a plan each of them fills, besides those that are sent or are outputs.
HOLES = {
    "expert_scales": "topk_weights",
    "tp_send_counts": "exchange_counts",
    "x_active_mask": "mask",
    "shared_expert_x": "shared_x",
    "ori_x": "ori_x",
    "const_expert_alpha_1": "alpha1",
    "const_expert_alpha_2": "alpha2",
    "const_expert_v": "const_v",
    "residual_x": "residual",
    "gamma": "gamma",
}
