"""How large the window of a buffer will be, before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from moe_triton.core.config import Product
from moe_triton.core.group_sizes import RanksPerServer
from moe_triton.core.tuning import Tuning, checked_tuning
from moe_triton.runtime import arguments
from moe_triton.runtime.chosen_scheme import Asked, choose_scheme
from moe_triton.schemes import layout_of
from moe_triton.tables.schemes import Outputs


def get_buffer_size_hint(
    num_ranks: int,
    *,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    num_shared_experts: int = 0,
    num_shared_ranks: int = 0,
    experts_per_rank: Sequence[int] | None = None,
    num_zero_experts: int = 0,
    num_copy_experts: int = 0,
    num_const_experts: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    product: Product = "A3",
    ranks_per_server: RanksPerServer = None,
    comm_alg: str | None = "auto",
    outputs: Outputs = "own",
    relaxed: bool = False,
    backend: str = "cpu",
    tuning: Tuning | None = None,
) -> int:
    """Bytes of the data window of one rank of a buffer that is constructed with these arguments.

    No rank is asked where it is: for ranks on several hosts pass how many each has as ``ranks_per_server``,
    and ``relaxed``, which the buffer itself does not need.

    Raises:
        ArgumentError: a size breaks a limit, or a table cannot be used.

    Examples:
        >>> sizes = dict(num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=32)
        >>> EPBuffer.get_buffer_size_hint(8, **sizes, comm_alg="fullmesh_v1")
        75497472
    """
    sizes = num_max_tokens_per_rank, hidden, num_topk, num_experts, num_shared_experts, num_shared_ranks
    special = num_zero_experts, num_copy_experts, num_const_experts
    chosen: dict[str, Any] = {"product": product, "relaxed": relaxed, "ranks_per_server": ranks_per_server}
    chosen["experts_per_rank"] = experts_per_rank
    whole = arguments.whole_config(num_ranks, sizes, special, **chosen)
    is_paired = arguments.is_group("tp_group", tp_group)
    asked = Asked(comm_alg, outputs, backend, checked_tuning(tuning).tables)
    config = choose_scheme(asked, whole, range(whole.num_ranks), is_paired).config
    return layout_of(config.padded).data_bytes
