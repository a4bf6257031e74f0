"""From logical experts to physical ones: what becomes of a dispatch's ids by a table that its caller holds.

Shapes: T tokens of this rank, K experts per token, N logical experts, P physical ones, F columns of a table.
"""

from __future__ import annotations

import reprlib
from typing import Any

import torch

from moe_triton.core.checks import check_choice, contiguous, not_plain_error, shown
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.replicas import REPLICA_BY, ReplicaBy
from moe_triton.runtime import arguments
from moe_triton.runtime.communicator import Communicator

TABLE = "eplb_table"
_IDS = (torch.int32, torch.int64)


def mapping_kernel(
    ids: torch.Tensor,
    table: torch.Tensor,
    by: ReplicaBy,
    target: str,
    prunes: bool = False,
    masked: bool = False,
    plain: bool = False,
) -> tuple[TritonKernel, dict[str, torch.Tensor | int]]:
    """The kernel that maps some ids by a table, and what of its arguments these decide.

    Args:
        ids: (T, K) int32 or int64.
        table: (N, F), or (rows, N) by "row".
        by: what chooses among replicas.
        target: name of the back end.
        prunes: whether it says which entries are kept.
        masked: whether a mask has a say in that.
        plain: by "token", as torch_npu has it.

    Returns:
        The kernel, which is compiled where none with its tiles has been (`map_experts_kernel`): on an NPU
        another number of columns may mean that. And its arguments by name; what is missing are outputs,
        numbers of ranks and of physical experts, and what it prunes by.
    """
    from moe_triton.kernels.map_experts import map_experts_kernel  # Triton's import takes long, and may fail

    num_columns, num_logical = table.shape if by == "row" else table.shape[::-1]
    is_wide = ids.dtype == torch.int64
    kernel = map_experts_kernel(
        ids.shape[1], by, num_logical, num_columns, target, is_wide, prunes, masked, plain
    )
    sizes = {"num_tokens": ids.shape[0], "num_logical": num_logical, "num_columns": num_columns}
    return kernel, {"given": ids, "table": table, **sizes}


class ExpertMapping:
    """The mappings of one buffer.

    Args:
        communicator: the buffer's.
        config: whose physical experts there are.
    """

    def __init__(self, communicator: Communicator, config: Config) -> None:
        self._communicator, rank = communicator, communicator.rank
        self._num_physical = config.num_experts
        self._num_special = config.num_special_experts
        # The physical experts of this server: its ranks, and what they hold, are neighbours.
        ranks = config.topology.neighbours(rank)
        own = [config.first_expert_on(each) for each in (ranks.start, ranks.stop)]
        self._constants = {
            "num_physical": self._num_physical,
            "rank": rank,
            "world_size": config.num_ranks,
            "own_first": own[0],
            "own_end": own[1],
        }

    def physical(self, topk_idx: Any, active_mask: Any, table: Any, mode: Any) -> torch.Tensor:
        """Ids of physical experts.

        Args:
            topk_idx: (T, K) int32 or int64, of logical experts; special experts have the ids behind those.
            active_mask: of the dispatch, or None: what an inactive entry holds does not matter.
            table: (N, F) int32, or (rows, N) by "row".
            mode: what chooses among an expert's replicas; None is "token".

        Returns:
            (T, K) int32.

        Raises:
            ArgumentError: a bad argument; where the host reads ids also a bad id, or a table that leads an
                entry to no expert, or two of a token to the same one.
            BufferStateError: the buffer is closed, broken or in use by another thread.
        """
        made = self._communicator
        backend, config = made.backend, made.config
        if table is None:
            rule = "it says how eplb_table is read"
            raise ArgumentError("eplb_mode", shown(mode), rule, f"Pass {TABLE} as well, or neither.")
        by: ReplicaBy = "token" if mode is None else check_choice("eplb_mode", mode, REPLICA_BY)
        shape: tuple[int | str, ...] = "T", config.num_topk
        ids = contiguous("topk_idx", topk_idx, shape=shape, dtypes=_IDS, device=backend.device)
        table = self._checked(table, by)
        num_logical = table.shape[1 if by == "row" else 0]
        if active_mask is not None:
            error = not_plain_error("active_mask", active_mask, backend.device)
            if error is not None:
                raise error
            shape = tuple(ids.shape[: 1 if active_mask.dim() == 1 else 2])
            active_mask = contiguous(
                "active_mask", active_mask, shape=shape, dtypes=(torch.bool,), device=backend.device
            )
        made.check_usable()
        if not backend.is_asynchronous:
            num_ids = num_logical + self._num_special
            ids = arguments.checked_ids(made, ids, active_mask, num_ids, lambda name: name)
        mapped = backend.empty(ids.shape, torch.int32)
        kernel, given = mapping_kernel(ids, table, by, backend.name)
        made.run_local(kernel, {**given, "topk_idx": mapped, **self._constants})
        if not backend.is_asynchronous:
            self._check_mapped(ids, mapped, active_mask, table, by)
        return mapped

    def _checked(self, table: Any, by: ReplicaBy) -> torch.Tensor:
        """A table, if its sizes are possible.

        Raises:
            ArgumentError: they are not.
        """
        shape = ("rows", "N") if by == "row" else ("N", "F")
        device = self._communicator.backend.device
        plain = contiguous(TABLE, table, shape=shape, dtypes=(torch.int32,), device=device)
        of_experts, other = plain.shape[::-1] if by == "row" else plain.shape
        least = 1 if by == "row" else 2
        if not 1 <= of_experts <= self._num_physical or other < least:
            if by == "row":
                rule = f"it is (rows, N) by 'row', with at least a row, for 1 to {self._num_physical} experts"
            else:
                rule = f"it is (N, F), for 1 to {self._num_physical} experts, a count and at least a replica"
            remedy = "num_experts counts physical experts: every logical one needs at least one of them."
            raise ArgumentError(TABLE, f"of shape {tuple(plain.shape)}", rule, remedy)
        return plain

    def _check_mapped(
        self,
        ids: torch.Tensor,
        mapped: torch.Tensor,
        active_mask: torch.Tensor | None,
        table: torch.Tensor,
        by: ReplicaBy,
    ) -> None:
        """Checks that every entry that takes part has an expert of its own.

        Raises:
            ArgumentError: the table has none for it, or the same one for two of a token.
        """
        active = mapped
        if active_mask is not None:
            mask = active_mask if active_mask.dim() == 2 else active_mask[:, None]
            active = arguments.active_entries(self._communicator, mapped, mask)
        bad = self._communicator.backend.first_bad_id(active, self._num_physical + self._num_special)
        if bad is None:
            return
        position, rule = bad
        token, k = divmod(position, ids.shape[1])
        expert, physical = int(ids[token, k]), int(mapped[token, k])
        held = int(table[token % len(table), expert]) if by == "row" else table[expert].tolist()
        value = f"{reprlib.repr(held)} for expert {expert} at token {token}, k {k}"
        if rule == "duplicate":
            others = [int(other) for other in ids[token][mapped[token] == physical] if int(other) != expert]
            text = f"experts {expert} and {others[0]} are both physical expert {physical}"
            raise ArgumentError(TABLE, value, text, "Give each replica to one logical expert.")
        text = f"ids of replicas are 0 to {self._num_physical - 1}"
        if by != "row":
            text = f"a row begins with the number of replicas, 1 to {table.shape[1] - 1}; {text}"
        raise ArgumentError(TABLE, value, text, "Build the table from a placement.")
