"""Schemes that no file of the package knows, made of its kernels: what a new one needs is all here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest
import torch

from moe_triton.core.errors import CommunicationTimeoutError
from moe_triton.core.handle import DispatchOutput
from moe_triton.core.plan import Placeholder, Plan, Value
from moe_triton.core.region import Region
from moe_triton.operators.variants import DispatchVariant, Variant
from moe_triton.schemes import SCHEMES
from moe_triton.schemes.common.waits import ENTRY_FINDERS
from moe_triton.schemes.direct.layout import DirectLayout
from moe_triton.schemes.direct.scheme import Direct
from moe_triton.schemes.fullmesh.combine import Combine
from moe_triton.schemes.fullmesh.dispatch import Dispatch
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.fullmesh.scheme import Fullmesh
from moe_triton.schemes.fullmesh.waits import FINDERS
from moe_triton.schemes.rank_context import Operator, RoundFacts
from moe_triton.schemes.scheme import Scheme, Scratch, WindowSpec
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import Case, experts_of, inputs_of
from tests.distributed.workers import compare_rounds, expected_round, patient_buffer
from tests.patience import seconds

BACK = "back_"


class TwoWindows(Scheme):
    """Rows go out through one window, and results come back through another one."""

    finders: ClassVar = ENTRY_FINDERS | FINDERS
    layout_of = WindowLayout
    layout: WindowLayout

    @cached_property
    def windows(self) -> tuple[WindowSpec, ...]:
        (own,) = super().windows
        return own, own._replace(peers=own.peers._replace(prefix=BACK))

    @property
    def statuses(self) -> tuple[tuple[Operator, Region], ...]:
        return (("barrier", self.layout.barrier_status), ("dispatch", self.layout.dispatch_status))

    def scratch(self) -> dict[str, Scratch]:
        return Fullmesh(self.context).scratch()

    def whole(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        if isinstance(variant, DispatchVariant):
            dispatch = Dispatch(self.context, variant, zone, parts)
            return dispatch.plan(dispatch.setup().launches + dispatch.teardown().launches)
        combine = Combine(self.context, variant, zone, parts)
        halves = combine.setup(), combine.teardown()
        launches = [
            replace(launch, values=tuple(map(_back, launch.values)))
            for half in halves
            for launch in half.launches
        ]
        return combine.plan(launches)


class ThreeZonesLayout(DirectLayout):
    """`DirectLayout` with another zone."""

    num_zones = 3


class ThreeZones(Direct):
    """Rows stay where they arrive, until the third dispatch after theirs begins."""

    layout_of = ThreeZonesLayout

    @cached_property
    def rounds(self) -> RoundFacts:
        return replace(super().rounds, num_zones=3)


def _back(value: Value) -> Value:
    """The same of the window that results come back through."""
    if isinstance(value, Placeholder) and value.name in ("window", "peers"):
        return replace(value, name=BACK + value.name)
    return value


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """The line that each scheme takes in the package, for as long as this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEMES["A3"], "two_windows", f"{__name__}:TwoWindows")
        patch.setitem(SCHEMES["A3"], "three_zones", f"{__name__}:ThreeZones")
        yield


def compare(rank: int, num_ranks: int, case: Case) -> list[str]:
    """See `compare_rounds`."""
    with registered():
        return compare_rounds(rank, num_ranks, case)


def leave_before_combine(rank: int, num_ranks: int, case: Case) -> tuple[str, tuple[int, ...]] | None:
    """What the others say when the last rank dispatches and then goes away."""
    with registered(), patient_buffer(case, timeout_s=seconds(2.0)) as buffer:
        inputs = inputs_of(case, rank, 0)
        output = buffer.dispatch(inputs.x, inputs.topk_idx)
        if rank == num_ranks - 1:
            return None
        with pytest.raises(CommunicationTimeoutError) as caught:
            buffer.combine(experts_of(case, rank, output.tokens), output.handle)
        return caught.value.operator, tuple(caught.value.missing_ranks)


def keep_outputs(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Rounds with results in the window; of the outputs, those that a zone has been given up for are checked.

    Returns:
        What differs from the reference.
    """
    wrong = []
    with registered(), patient_buffer(case) as buffer:
        assert isinstance(buffer.layout, DirectLayout)
        kept: list[DispatchOutput] = []
        for number in range(8):
            inputs = inputs_of(case, rank, number)
            kept.append(buffer.dispatch(inputs.x, inputs.topk_idx))
            for age in range(min(number + 1, 3)):
                received = expected_round(case, number - age)[0][rank]
                wrong += [f"{number}, {age} ago: {name}" for name in wrong_received(kept[-1 - age], received)]
            y = buffer.expert_output()
            y[: len(kept[-1].tokens)] = experts_of(case, rank, kept[-1].tokens)
            out = buffer.combine(y, kept[-1].handle)
            if not torch.equal(out, expected_round(case, number)[1][rank]):
                wrong.append(f"{number}: combined")
    return wrong
