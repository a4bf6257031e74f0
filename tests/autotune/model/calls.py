"""Traffic and launches that the model's tests share."""

from __future__ import annotations

import functools

import torch

from autotune.model.clusters.routing import draw_ids
from autotune.model.topology import tiers
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.plan import Launch, Plan
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.core.tuning import Tuning
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext

CORES = 48


def config(ranks: int = 8, tokens: int = 16, hidden: int = 7168, scheme: str = "fullmesh_v1") -> Config:
    """256 experts, 8 for each token."""
    return Config(ranks, tokens, hidden, 8, 256, scheme=scheme, relaxed=True)


@functools.cache
def traffic(settings: Config, rank: int = 0, seed: int = 0) -> Traffic:
    """Of uniform routing, on A3."""
    tokens, topk, experts = settings.num_max_tokens_per_rank, settings.num_topk, settings.num_experts
    ids = draw_ids("uniform", settings.num_ranks, tokens, topk, experts, seed)
    return traffic_of(settings, rank, ids, tiers("A3", settings.num_ranks, rank))


def plan(
    settings: Config,
    operator: str,
    quantize: str | None = "int8",
    blocks: int = CORES,
    parts: int = 1,
    receiving: int | None = None,
) -> Plan:
    """As an NPU has it, with so many receiving blocks if they are given."""
    tuning = Tuning(receiving_blocks=receiving)
    scheme = make_scheme(RankContext(settings, 0, blocks, 60_000_000, CAPABILITIES["npu"], tuning=tuning))
    dispatch = DispatchVariant(torch.bfloat16, ROW_FORMATS[quantize], False, True)
    return scheme.whole(
        dispatch if operator == "dispatch" else CombineVariant(torch.bfloat16, True), 0, parts
    )


def launch_of(kernel: str, settings: Config, quantize: str | None = "int8", blocks: int = CORES) -> Launch:
    """The launch of a kernel in dispatch or combine, on so many blocks."""
    receiving = blocks if kernel in {"dispatch_receive", "inband_collect"} else 0
    launches = [*plan(settings, "dispatch", quantize, blocks + bool(receiving), 1, receiving).launches]
    launches += plan(settings, "combine", quantize, blocks).launches
    return next(launch for launch in launches if launch.kernel.name == kernel)
