"""Layers of torch_npu's operators whose experts return what they get, so that nobody waits in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import torch_npu_ops as ops
from moe_triton.core.soc import SOC_OF_PRODUCT, Product
from tests.npu import standin
from tests.npu.device import Device
from tests.torch_npu_ops.setting import TOKENS, TOPK, Round, make_round

Outputs = list[torch.Tensor]
# A round, and where everything goes that must live until it has run.
Layer = Callable[[Round, list[Any]], torch.Tensor]
MASK = torch.arange(TOKENS) < TOKENS - 1


@contextmanager
def on_npu(
    rank: int, policy: str = "random", timeout_s: float = 20.0, product: Product = "A3", **settings: Any
) -> Iterator[Device]:
    """The stand-in, with small sizes allowed; nothing of the group's is left behind."""
    device = standin.install(policy, seed=rank, soc=SOC_OF_PRODUCT[product])
    given = {"relaxed": True, "timeout_s": timeout_s, "backend": "npu", "num_blocks": 2, **settings}
    ops.configure(product=product, **given)
    try:
        yield device
    finally:
        ops.release(ops.group_name())
        ops.configure()
        dist.barrier()


def v1(r: Round, keep: list[Any]) -> torch.Tensor:
    out = ops.npu_moe_distribute_dispatch(r.x, r.ids, *r.group)
    keep.append(out)
    return ops.npu_moe_distribute_combine(out[0], r.ids, out[2], out[4], r.weights, *r.group)


def v1_alone(r: Round, keep: list[Any]) -> torch.Tensor:
    """Three operators: the shared zone is another one after them."""
    keep.append(ops.npu_moe_distribute_dispatch(r.x, r.ids, *r.group))
    return v1(r, keep)


def v2(r: Round, keep: list[Any], **options: Any) -> torch.Tensor:
    out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, expert_scales=r.weights, **options)
    keep.append(out)
    return ops.npu_moe_distribute_combine_v2(out[0], r.ids, out[2], out[4], r.weights, *r.group, **options)


def v2_twice(r: Round, keep: list[Any]) -> torch.Tensor:
    """Two combines of one dispatch: the second needs a wait of its own."""
    out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
    keep.append(out)
    for _ in range(2):
        keep.append(ops.npu_moe_distribute_combine_v2(out[0], r.ids, out[2], out[4], r.weights, *r.group))
    return keep[-1]  # type: ignore[no-any-return]


def inband(r: Round, keep: list[Any]) -> torch.Tensor:
    return v2(r, keep, comm_alg="fullmesh_v2")


def masked(r: Round, keep: list[Any]) -> torch.Tensor:
    keep.append(torch.zeros(r.group[1], dtype=torch.int64, device=r.x.device))
    return v2(r, keep, x_active_mask=MASK, performance_info=keep[-1])


def halves(r: Round, keep: list[Any]) -> torch.Tensor:
    y, expand_idx, ticket = ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group)
    out = ops.npu_moe_distribute_dispatch_teardown(r.x, y, r.ids, ticket, *r.group)
    quant, second = ops.npu_moe_distribute_combine_setup(out[0], r.ids, out[2], *r.group)
    keep.append((y, expand_idx, ticket, out, quant, second))
    return ops.npu_moe_distribute_combine_teardown(
        out[0], quant, r.ids, expand_idx, r.weights, second, *r.group
    )


def norm(r: Round, keep: list[Any], norm_eps: float = 1e-6) -> torch.Tensor:
    """The third output is the sum with the residual, here zeros."""
    out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
    residual = torch.zeros_like(r.x)[:, None]
    gamma = torch.ones_like(r.x[0])
    normed = ops.npu_moe_distribute_combine_add_rms_norm(
        out[0], r.ids, out[2], out[4], r.weights, residual, gamma, *r.group, norm_eps=norm_eps
    )
    keep.append((out, residual, gamma, normed))
    return normed[2][:, 0]


def expected(r: Round) -> torch.Tensor:
    """What a layer gives: a token's sum by weight, k ascending, in fp32."""
    total = torch.zeros(r.x.shape, dtype=torch.float32)
    for k in range(TOPK):
        total = total + r.x.float() * r.weights[:, k : k + 1]
    return total.bfloat16()


def is_right(layer: Layer, r: Round, out: torch.Tensor) -> bool:
    """Whether a layer's output, which has been waited for, has the right bits."""
    front = slice(0, TOKENS - 1) if layer is masked else slice(None)
    return torch.equal(out[front], expected(r)[front])


def eager(layer: Layer, rank: int, num_ranks: int, seed: int) -> bool:
    """A layer outside of graphs. Whether it gave the right bits."""
    r, keep = make_round(rank, num_ranks, seed=seed), []  # type: ignore[var-annotated]
    out = layer(r, keep)
    ops.synchronize(ops.group_name())
    return is_right(layer, r, out)
