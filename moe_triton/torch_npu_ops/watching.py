"""What a group's windows on this rank do, and have done (docs/when-it-hangs.md, docs/metrics.md)."""

from __future__ import annotations

from moe_triton.core.flight_file import Flight
from moe_triton.core.metrics import Metrics, metrics_of
from moe_triton.runtime.recorder import Recorder
from moe_triton.runtime.status import recorder_of, status_of
from moe_triton.torch_npu_ops import registry


def status(name: str) -> str:
    """What this rank does now in a group, in words: in which call, since when, and for whom it waits.

    A line for each window of the group, in the order of their making. From any thread, also while another
    one hangs in a call. ``moe-triton status --group`` says it of all ranks of a machine.

    Args:
        name: of the expert-parallel group.

    Returns:
        "" where the group has no windows: no call has been made yet.

    Raises:
        ArgumentError: no group.
        BufferStateError: there is no flight recorder, for MOE_TRITON_FLIGHT is off.

    Examples:
        >>> outputs = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group)
        >>> "in no call for" in torch_npu.status(group[0])
        True
    """
    recorders = _recorders(name)
    return status_of(recorders) if recorders else ""


def flight(name: str) -> list[Flight]:
    """What flight recorders have of a group: for each of its windows the last 64 operators.

    From any thread. ``as_json`` of each makes a file's contents, which ``moe-triton flight`` reads.

    Args:
        name: of the expert-parallel group.

    Raises:
        ArgumentError: no group.
        BufferStateError: there is no flight recorder, for MOE_TRITON_FLIGHT is off.

    Examples:
        >>> outputs = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group)
        >>> torch_npu.flight(group[0])[-1].runs[-1].operator
        'dispatch'
    """
    return [recorder.flight() for recorder in _recorders(name)]


def metrics(name: str) -> list[Metrics]:
    """Plain numbers of a group, for each of its windows: ``moe_triton.metrics.prometheus`` takes the list.

    From any thread, as often as wanted: it asks no other rank.

    Args:
        name: of the expert-parallel group.

    Raises:
        ArgumentError: no group.
        BufferStateError: there is no flight recorder, for MOE_TRITON_FLIGHT is off.

    Examples:
        >>> outputs = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group)
        >>> sum(each.rounds["dispatch"] for each in torch_npu.metrics(group[0])) > 0
        True
    """
    return [metrics_of(recorder.now()) for recorder in _recorders(name)]


def _recorders(name: str) -> list[Recorder]:
    return [recorder_of(made.recorder) for _, made in registry.windows(name)]
