"""Schemes that no file of the package knows, made of its kernels: what a new one needs is all here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from moe_triton.core.config import Config
from moe_triton.core.errors import CommunicationTimeoutError
from moe_triton.core.plan import Hole, Plan, Value
from moe_triton.core.region import Region
from moe_triton.schemes import SCHEMES
from moe_triton.schemes.common.flags import barrier_plan
from moe_triton.schemes.common.waits import ENTRY_FINDERS
from moe_triton.schemes.fullmesh.combine import CombinePlans
from moe_triton.schemes.fullmesh.dispatch import DispatchPlans
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.fullmesh.waits import FINDERS
from moe_triton.schemes.scheme import Scheme, WindowSpec
from moe_triton.schemes.site import Operator
from moe_triton.schemes.variants import DispatchVariant, Variant
from tests.distributed.cases import Case, experts_of, inputs_of
from tests.distributed.workers import compare_rounds, make_buffer

BACK = "back_"


class TwoWindows(Scheme):
    """Rows go out through one window, and results come back through another one."""

    finders: ClassVar = ENTRY_FINDERS | FINDERS
    layout_of = WindowLayout

    @cached_property
    def _layout(self) -> WindowLayout:
        return WindowLayout(self.site.config)

    @cached_property
    def windows(self) -> tuple[WindowSpec, ...]:
        return WindowSpec(self._layout), WindowSpec(self._layout, prefix=BACK)

    @property
    def statuses(self) -> tuple[tuple[Operator, Region], ...]:
        return (("barrier", self._layout.barrier_status), ("dispatch", self._layout.dispatch_status))

    def whole(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        if isinstance(variant, DispatchVariant):
            dispatch = DispatchPlans(self.site, self._layout)
            halves = dispatch.setup(variant, zone, parts), dispatch.teardown(variant, zone)
            return Plan("dispatch", zone, halves[0].launches + halves[1].launches)
        combine = CombinePlans(self.site, self._layout)
        halves = combine.setup(variant, zone), combine.teardown(variant, zone, parts)
        launches = [
            replace(launch, values=tuple(map(_back, launch.values)))
            for half in halves
            for launch in half.launches
        ]
        return Plan("combine", zone, tuple(launches))

    def barrier(self, zone: int, timeout_us: int | None = None) -> Plan:
        return barrier_plan(self.site, self._layout.barrier_status, zone, timeout_us)


def _back(value: Value) -> Value:
    """The same of the window that results come back through."""
    if isinstance(value, Hole) and value.name in ("window", "peers"):
        return replace(value, name=BACK + value.name)
    return value


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """The one line that a scheme takes in the package, for as long as this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEMES["A3"], "two_windows", f"{__name__}:TwoWindows")
        yield


def compare(rank: int, num_ranks: int, case: Case) -> list[str]:
    """See `compare_rounds`."""
    with registered():
        return compare_rounds(rank, num_ranks, case)


def leave_before_combine(rank: int, num_ranks: int, case: Case) -> tuple[str, tuple[int, ...]] | None:
    """What the others say when the last rank dispatches and then goes away."""
    with registered(), make_buffer(case, timeout_s=2.0) as buffer:
        inputs = inputs_of(case, rank, 0)
        output = buffer.dispatch(inputs.x, inputs.topk_idx)
        if rank == num_ranks - 1:
            return None
        with pytest.raises(CommunicationTimeoutError) as caught:
            buffer.combine(experts_of(case, rank, output.tokens), None, output.handle)
        return caught.value.operator, tuple(caught.value.missing_ranks)


def sizes(case: Case) -> tuple[int, int]:
    """Bytes of the data windows, by hand and as `EPBuffer` says."""
    from moe_triton import EPBuffer

    c: Config = case.config
    with registered():
        hint = EPBuffer.get_buffer_size_hint(
            c.num_ranks,
            num_max_tokens_per_rank=c.num_max_tokens_per_rank,
            hidden=c.hidden,
            num_topk=c.num_topk,
            num_experts=c.num_experts,
            comm_alg=c.scheme,
        )
    return hint, WindowLayout(c).data_bytes
