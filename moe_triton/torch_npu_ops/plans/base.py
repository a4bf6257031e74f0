"""What plans of dispatch and of combine have in common: who takes part, where they run, what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import BufferStateError
from moe_triton.runtime.communicator import Communicator
from moe_triton.schemes.scheme import Scheme
from moe_triton.schemes.site import Site
from moe_triton.schemes.variants import CombineVariant, DispatchVariant
from moe_triton.torch_npu_ops import registry
from moe_triton.torch_npu_ops.plans.elastic import Deployment, deployment_of

V = TypeVar("V", DispatchVariant, CombineVariant)


class GroupAttributes(Protocol):
    """The attributes of a call that say where it runs."""

    @property
    def group_ep(self) -> str: ...  # noqa: D102
    @property
    def ep_world_size(self) -> int: ...  # noqa: D102
    @property
    def ep_rank_id(self) -> int: ...  # noqa: D102
    @property
    def group_tp(self) -> str: ...  # noqa: D102
    @property
    def tp_world_size(self) -> int: ...  # noqa: D102
    @property
    def tp_rank_id(self) -> int: ...  # noqa: D102
    @property
    def elastic(self) -> tuple[int, ...] | None: ...  # noqa: D102


@dataclass(frozen=True)
class CallSite:
    """Where the calls of a plan run.

    Attributes:
        deployment: the ranks that take part.
        place: names the communicator.
        exchange_rank: this rank's number among two tensor-parallel ranks, or None.
    """

    deployment: Deployment
    place: registry.Place
    exchange_rank: int | None


def call_site_of(a: GroupAttributes, config: Config) -> CallSite:
    """Checks ranks and sizes against the groups, and what elastic_info says.

    Raises:
        ArgumentError: they contradict each other.
    """
    registry.check_membership(
        a.group_ep, "group_ep", a.ep_world_size, a.ep_rank_id, ("ep_world_size", "ep_rank_id")
    )
    group_tp, exchange_rank = "", None
    if a.tp_world_size == 2:
        group_tp, exchange_rank = a.group_tp, a.tp_rank_id
        registry.check_membership(group_tp, "group_tp", 2, a.tp_rank_id, ("tp_world_size", "tp_rank_id"))
    deployment = deployment_of(config, a.ep_rank_id, a.elastic)
    place = registry.Place(a.group_ep, group_tp, deployment.config, deployment.members)
    return CallSite(deployment, place, exchange_rank)


@dataclass(frozen=True, eq=False)
class OperatorPlan(Generic[V]):
    """A checked call of one shape.

    Attributes:
        config: the group's settings as called.
        site: where it runs.
        variant: which kernels run.
    """

    config: Config
    site: CallSite
    variant: V

    @property
    def deployment(self) -> Deployment:
        """The ranks that take part."""
        return self.site.deployment

    @property
    def window_bytes(self) -> int:
        """Bytes of the data windows that this plan works in.

        HCCL_BUFFSIZE has to cover that of the group, and that between two tensor-parallel ranks by itself.
        """
        return sum(window.layout.data_bytes for window in self._scheme.windows)

    @property
    def workspace_bytes(self) -> int:
        """Private bytes that this plan's kernels need between them."""
        return self._scheme.workspace_bytes(self.variant)

    @cached_property
    def _scheme(self) -> Scheme:
        """To ask for sizes, before anything is made."""
        place = self.deployment
        return Site(place.config, place.rank, 1, 0, "cpu", self.site.exchange_rank).scheme

    @cached_property
    def num_ids(self) -> int:
        """Legal ids: those of the routed experts that are left, and of the special ones."""
        return self.deployment.config.num_experts + self.deployment.config.num_special_experts

    @cached_property
    def access(self) -> registry.Access:
        """The way to the communicator."""
        return registry.Access(self.site.place)

    @property
    def communicator(self) -> Communicator:
        """Made, with all ranks of the group, when a call first needs it."""
        return self.access.communicator()

    @cached_property
    def rank_table(self) -> torch.Tensor:
        """(EP,) int32: original number of each rank that takes part."""
        members = self.deployment.members or tuple(range(self.config.num_ranks))
        return self.table(members, torch.int32)

    def table(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Constants of this plan, on its device.

        Raises:
            BufferStateError: inside a graph, which would hold a copy from memory that is gone by then.
        """
        backend = self.communicator.backend
        if backend.is_capturing():
            raise BufferStateError(
                "a call of this kind has not run before, and nothing can be prepared inside a graph. Run the "
                "same calls once before the capture."
            )
        return torch.tensor(values, dtype=dtype, device=backend.device)
