"""Cases of torch_npu's operators: one field per feature, and what every process passes.

A feature is a field of `OperatorCase`, and `FEATURES` lists the values that are worth combining; `is_valid`
says which combinations the operators accept. `tests.distributed.operator_runs` runs a case and checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_triton import reference
from moe_triton.core.config import Product
from moe_triton.core.row_formats import BY_QUANT_MODE, INT8_128, RowFormat
from moe_triton.reference import Deployment
from moe_triton.schemes import product_of
from tests.reference_helpers import elastic_info_of

Tensors = dict[str, torch.Tensor]

# Zero, copy and constant experts.
SPECIAL = {"none": (0, 0, 0), "zero": (2, 0, 0), "copy": (0, 1, 0), "const": (0, 0, 2), "all": (1, 2, 1)}

FEATURES: dict[str, tuple[Any, ...]] = {
    "version": (2, 1),
    "tp": (0, 1, 2),
    "ranks": (4, 2, 3, 6, 8),
    "shared": ((1, 0), (0, 0), (1, 1), (1, 2), (2, 2), (1, 3), (2, 4)),
    "experts_per_rank": (2, 1, 3),
    "topk": (2, 1, 5),
    "batch": (4, 1, 9),
    "hidden": (64, 32, 160),
    "dtype": (torch.bfloat16, torch.float16),
    "routing": ("uniform", "skewed", "sparse", "none"),
    "values": ("usual", "extreme"),
    "tokens": ("equal", "global_bs", "fewer", "variable"),
    "mask": ("none", "tokens", "entries"),
    "quantize": ("none", "dynamic", "smooth", "scales only"),
    "dispatch_weights": (True, False),
    "combine_weights": (True, False),
    "nums_type": (1, 0),
    "special": ("none", "zero", "copy", "const", "all"),
    "alphas": ("numbers", "rows"),
    "comm_alg": ("", "fullmesh_v1", "fullmesh_v2", "fullmesh"),
    "comm_quant_mode": (0, 2),
    "shared_expert_x": ("none", "flat", "3-D"),
    "norm": (False, True),
    "elastic": ("none", "unscaled", "routed", "shared", "both"),
    "performance_info": (False, True),
    "num_blocks": (None, 1, 3),
    "receiving_blocks": (None, 1),
    "kernels": ("triton", "torch"),
    "stragglers": (False, True),
}


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """A deployment and its rounds of dispatch and combine.

    Attributes:
        seed: everything that a rank passes follows from it.
        rounds: how often, each time with other tokens.
        version: of the operators, 1 or 2.
        tp: tp_world_size.
        ranks: EP.
        servers: ranks of each; () for what the product's have.
        given_product: whose limits and schemes they are; None for that of comm_alg.
        shared: S and R.
        experts_per_rank: localE.
        topk: K.
        batch: most tokens of a rank.
        hidden: H.
        dtype: of x.
        long_ids: of torch_npu's functions: ids are int64.
        routing: "uniform", "skewed" to few experts, "sparse" with ids of -1 between, or "none" at all.
        values: "usual", or "extreme": rows of zeros, of tiny and of huge numbers, infinities and NaN,
            negative weights, and rubbish where nothing may look.
        tokens: the ranks' are "equal", or equal with "global_bs" spelt out, or "fewer" than it says, or
            "variable".
        mask: "none", by "tokens" (1-D) or by "entries" (2-D).
        quantize: "none"; "dynamic"; "smooth" with scales; or "scales only", without quant_mode.
        in_blocks: of a buffer: quantised with a scale for every 128 elements.
        dispatch_weights: expert_scales given to dispatch.
        combine_weights: expert_scales given to combine.
        nums_type: expert_token_nums_type.
        special: a key of `SPECIAL`.
        alphas: of constant experts: "numbers" (C,) or "rows" (C, H).
        comm_alg: as passed.
        comm_quant_mode: as passed.
        shared_expert_x: given to combine: "none", "flat" (BS, H), or "3-D" with its tokens in two dimensions.
        norm: combine ends in a residual and a norm.
        elastic: elastic_info: "none"; "unscaled"; or without a "routed" rank, a replica of each "shared"
            expert, or "both".
        performance_info: given.
        num_blocks: blocks per kernel, None for what suits the machine.
        receiving_blocks: of them, those that receive while the others send, as an NPU's do by default; None
            for what a CPU does.
        kernels: "triton" or "torch".
        stragglers: every process is late to each call by another time.
    """

    seed: int = 1
    rounds: int = 2
    version: int = 2
    tp: int = 0
    ranks: int = 4
    servers: tuple[int, ...] = ()
    given_product: Product | None = None
    shared: tuple[int, int] = (1, 0)
    experts_per_rank: int = 2
    topk: int = 2
    batch: int = 4
    hidden: int = 64
    dtype: torch.dtype = torch.bfloat16
    long_ids: bool = False
    routing: str = "uniform"
    values: str = "usual"
    tokens: str = "equal"
    mask: str = "none"
    quantize: str = "none"
    in_blocks: bool = False
    dispatch_weights: bool = True
    combine_weights: bool = True
    nums_type: int = 1
    special: str = "none"
    alphas: str = "numbers"
    comm_alg: str = ""
    comm_quant_mode: int = 0
    shared_expert_x: str = "none"
    norm: bool = False
    elastic: str = "none"
    performance_info: bool = False
    num_blocks: int | None = None
    receiving_blocks: int | None = None
    kernels: str = "triton"
    stragglers: bool = False

    @property
    def num_processes(self) -> int:
        """Processes that a run takes, those of lost ranks included."""
        return self.ranks * max(self.tp, 1)

    @property
    def num_experts(self) -> int:
        """Routed experts before any loss (M)."""
        return self.experts_per_rank * (self.ranks - self.shared[1])

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that elastic_info leaves out."""
        num_shared, shared_ranks = self.shared
        shared = range(0, shared_ranks, max(shared_ranks // max(num_shared, 1), 1))
        return (
            *(shared if self.elastic in ("shared", "both") else ()),
            *((self.ranks - 1,) if self.elastic in ("routed", "both") else ()),
        )

    @property
    def quant_mode(self) -> int:
        """As passed to dispatch."""
        return 2 if self.quantize in ("dynamic", "smooth") else 0

    @property
    def row_format(self) -> RowFormat:
        """As passed to dispatch of a buffer, and as the reference takes it."""
        return INT8_128 if self.in_blocks else BY_QUANT_MODE[self.quant_mode]

    @property
    def global_bs(self) -> int:
        """As passed to both."""
        tokens = {"equal": 0, "global_bs": self.batch, "fewer": self.batch + 1, "variable": self.batch}
        return tokens[self.tokens] * self.ranks

    @property
    def product(self) -> Product:
        """Whose limits and schemes they are."""
        return self.given_product or product_of(self.comm_alg)

    def deployment(self) -> Deployment:
        """As the reference takes it."""
        num_zero, num_copy, num_const = SPECIAL[self.special]
        whole = Deployment(
            ep_world_size=self.ranks,
            moe_expert_num=self.num_experts,
            shared_expert_num=self.shared[0],
            shared_expert_rank_num=self.shared[1],
            tp_world_size=self.tp,
            zero_expert_num=num_zero,
            copy_expert_num=num_copy,
            const_expert_num=num_const,
            version=self.version,
        )
        if self.elastic == "none":
            return whole
        words = elastic_info_of(whole, self.lost)
        return replace(whole, elastic_info=(int(self.elastic != "unscaled"), *words[1:]))


def is_valid(case: OperatorCase) -> bool:
    """Whether the operators accept the case. Sizes below the products' limits count as accepted."""
    return all(
        holds
        for applies, holds in (
            (True, _is_deployable(case)),
            (case.version == 1, _is_version_1(case)),
            (case.comm_alg == "fullmesh_v2", _is_inband(case)),
            (case.product == "A2", _is_of_a2(case)),
            (case.servers != (), _has_servers(case)),
            (case.tp == 2, _is_tensor_parallel(case)),
            (case.elastic != "none", case.version == 2 and case.tp != 2),
            (case.quantize == "scales only", case.version == 1),
            (case.mask != "none", case.tokens in ("equal", "global_bs")),
            (case.shared_expert_x != "none", case.shared[1] == 0),
            (case.norm, case.dtype == torch.bfloat16),
            (case.receiving_blocks is not None, (case.num_blocks or 1) > 1 and not case.servers),
            (case.alphas == "rows", SPECIAL[case.special][2] > 0),
        )
        if applies
    )


def _is_deployable(case: OperatorCase) -> bool:
    num_shared, shared_ranks = case.shared
    if shared_ranks >= case.ranks or (shared_ranks and shared_ranks % num_shared):
        return False
    lost_shared = sum(rank < shared_ranks for rank in case.lost)
    lost_routed = len(case.lost) - lost_shared
    if case.elastic in ("shared", "both") and not 0 < lost_shared < shared_ranks:
        return False
    routed_ranks = case.ranks - shared_ranks - lost_routed
    return (
        routed_ranks > 0
        and case.ranks - len(case.lost) > 1
        and case.topk <= case.experts_per_rank * routed_ranks + sum(SPECIAL[case.special])
    )


def _is_version_1(case: OperatorCase) -> bool:
    num_shared, shared_ranks = case.shared
    return (
        case.special == case.elastic == "none"
        and (case.mask == "none" or case.product == "A2")
        and (num_shared <= 1 and (not shared_ranks or case.ranks % shared_ranks == 0))
        and not (shared_ranks and case.tokens in ("fewer", "variable"))
        and not (case.comm_alg or case.shared_expert_x != "none" or case.norm or case.performance_info)
        and case.topk <= 8
    )


def _is_inband(case: OperatorCase) -> bool:
    return case.elastic == "none" and case.tp != 2 and case.topk <= 12


def _is_of_a2(case: OperatorCase) -> bool:
    return (
        case.shared[1] == case.comm_quant_mode == SPECIAL[case.special][2] == 0
        and case.shared_expert_x == case.elastic == "none"
        and case.tp != 2
    )


def _has_servers(case: OperatorCase) -> bool:
    return sum(case.servers) == case.ranks and case.comm_alg != "fullmesh_v2" and case.tp != 2


def _is_tensor_parallel(case: OperatorCase) -> bool:
    return case.experts_per_rank == 1 and case.comm_quant_mode == 0


def tensors_of(case: OperatorCase, process: int, number: int) -> Tensors:
    """Every tensor that a process may pass in a round, by torch_npu's name."""
    everyone = torch.Generator().manual_seed(case.seed * 1_000_003 + number)
    own = torch.Generator().manual_seed(case.seed * 1_000_003 + (process + 1) * 1_009 + number)
    batch, num_const = case.batch, SPECIAL[case.special][2]
    if case.tokens == "variable":
        batch = int(torch.randint(0, case.batch + 1, (), generator=own))

    def rows(*shape: int, generator: torch.Generator = own) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    tensors = {
        "x": rows(batch, case.hidden) * 3,
        "expert_ids": _ids_of(case, batch, own),
        "expert_scales": torch.rand(batch, case.topk, generator=own),
        "shared_expert_x": rows(batch, case.hidden),
        "ori_x": rows(batch, case.hidden),
        "residual_x": rows(batch, 1, case.hidden),
    }
    num_shared = case.shared[0] if case.shared[1] else 0
    shape = (num_shared + case.num_experts, case.hidden)
    tensors["scales"] = torch.rand(shape, generator=everyone) + 0.5
    tensors["gamma"] = rows(case.hidden, generator=everyone)
    alphas = (num_const, case.hidden) if case.alphas == "rows" else (num_const,)
    for name in ("const_expert_alpha_1", "const_expert_alpha_2"):
        tensors[name] = rows(*alphas, generator=everyone)
    tensors["const_expert_v"] = rows(num_const, case.hidden, generator=everyone)
    if case.mask != "none":
        tensors["x_active_mask"] = _mask_of(case, batch, own)
    if case.values == "extreme":
        for name in ("x", "shared_expert_x", "ori_x", "residual_x"):
            _make_extreme(tensors[name].view(batch, case.hidden), own)
        tensors["expert_scales"] -= 0.5
        _spoil_what_is_left_out(tensors)
    return tensors


def _ids_of(case: OperatorCase, batch: int, generator: torch.Generator) -> torch.Tensor:
    """(BS, K) int32, distinct in a row."""
    left = case.deployment().after_losses()
    popularity = torch.rand(batch, left.moe_expert_num + sum(SPECIAL[case.special]), generator=generator)
    if case.routing == "skewed":
        popularity += torch.linspace(2, 0, popularity.shape[1]) ** 3
    ids = popularity.topk(case.topk, dim=1).indices.int()
    if case.routing == "sparse":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    if case.routing == "none":
        ids.fill_(-1)
    return ids


def _mask_of(case: OperatorCase, batch: int, generator: torch.Generator) -> torch.Tensor:
    if case.mask == "tokens":
        return torch.arange(batch) < torch.randint(0, batch + 1, (), generator=generator)
    mask = torch.rand(batch, case.topk, generator=generator) < 0.6
    mask[torch.rand(batch, generator=generator) < 0.2] = False
    return mask


def _make_extreme(x: torch.Tensor, generator: torch.Generator) -> None:
    """Replaces each row by one of a kind that quantisation treats apart, or leaves it."""
    for row in x:
        kind = int(torch.randint(0, 6, (), generator=generator))
        if kind == 0:
            row.zero_()
        elif kind == 1:
            row.copy_(row * 2.0**-126)
        elif kind == 2:
            row.copy_(row * torch.finfo(x.dtype).max)
        elif kind in (3, 4):
            at = torch.randint(0, len(row), (), generator=generator)
            row[at] = float("nan") if kind == 3 else float("inf")


def _spoil_what_is_left_out(tensors: Tensors) -> None:
    """Weights of entries without an expert are NaN; of what a mask leaves out, ids are rubbish as well."""
    ids, weights, mask = tensors["expert_ids"], tensors["expert_scales"], tensors.get("x_active_mask")
    weights[ids < 0] = float("nan")
    if mask is not None:
        left_out = ~(mask if mask.dim() == 2 else mask[:, None].expand_as(ids))
        weights[left_out] = float("nan")
        ids[left_out] = 2**30


def experts_of(
    case: OperatorCase, process: int, expand_x: torch.Tensor, dynamic_scales: torch.Tensor | None
) -> torch.Tensor:
    """A stand-in for a process's experts: other numbers on each, and exact wherever it is computed."""
    rows = expand_x.float()
    if dynamic_scales is not None:
        rows = reference.dequantize(expand_x, dynamic_scales[: len(rows)])
    return (rows * (0.25 + process) + process).to(case.dtype)
