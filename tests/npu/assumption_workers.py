"""Checks of assumptions on the stand-in, as it is or with one thing different from what is documented."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from moe_triton.backends.npu import runtime
from moe_triton.core import abi
from moe_triton.layout import BLOCK_DATA_BYTES
from moe_triton.schemes.fullmesh.ascendc import INBAND_SEND
from moe_triton.tools.selftest.npu_assumptions import ASSUMPTIONS
from tests.npu import standin
from tests.npu.device import Device, FakeStream, Work

# What is different, by the assumption that it breaks.
FAULTS = {
    "the device's name is a SoC of the table": "another name",
    "a tensor over device memory that is not torch's": "a copy",
    "memfabric makes windows that are posted from, on A2 and A3": "no RDMA",
    "a compiled Triton kernel takes addresses": "nothing runs",
    "a kernel is launched through ctypes": "nothing runs",
    "npu_stream empties torch_npu's queue": "a lazy handle",
    "scalars are read anew in every kernel": "an old scalar",
    "events order two streams": "no events",
    "512 aligned bytes of a copy arrive with their last 32 last": "flags first",
    "GetSystemCycle counts 50 a microsecond": "nothing runs",
    "a copy to pinned memory does not wait": "no copy",
    "launches through ctypes are captured": "a leaky capture",
}


def check(rank: int, num_ranks: int, name: str, policy: str) -> str | None:
    standin.install(policy)
    return _check(name)


def _check(name: str) -> str | None:
    (assumption,) = [known for known in ASSUMPTIONS if known.name == name]
    return assumption.check()


def check_with_fault(rank: int, num_ranks: int, name: str, fault: str) -> str | None:
    device = standin.install("communication first")
    with _FAULTS[fault](device):
        try:
            return _check(name)
        except Exception as error:  # that is an answer too
            return f"{type(error).__name__}: {error}"


def _nothing_runs(device: Device) -> Any:
    def at_once(self: Device, work: Work) -> None:
        if work.kind != "launch":
            usual(self, work)

    usual = Device.at_once
    return patch.object(Device, "at_once", at_once)


def _without_rdma(*given: Any) -> Any:
    raise RuntimeError("the type RDMA is not supported")


def _old_scalar(device: Device) -> Any:
    """Every kernel sees the number that the first one saw."""
    return patch.object(torch.Tensor, "fill_", lambda self, value: self)


def _leaky_capture(device: Device) -> Any:
    """What is launched while a graph is captured runs at once, and not with the graph."""

    def at_once(self: Device, work: Work) -> None:
        self.log.append(work)
        work.stream.pending.append(work)

    return patch.object(Device, "at_once", at_once)


def _flags_first(device: Device) -> Any:
    """Flags in band arrive, and the data of the first block is not there yet."""

    def at_once(self: Device, work: Work) -> None:
        usual(self, replace(work, run=lambda: _send_flags(work)) if work.name == "inband_send" else work)

    usual = Device.at_once
    return patch.object(Device, "at_once", at_once)


def _send_flags(work: Work) -> None:
    work.run()
    places = {arg.name: 1 + word for arg, word in abi.word_offsets(INBAND_SEND.args)}
    window = ctypes.c_uint64.from_address(work.words[places["peers"]]).value
    ctypes.memset(window + work.words[places["slots"]], 0, BLOCK_DATA_BYTES)


_FAULTS: dict[str, Callable[[Device], Any]] = {
    "another name": lambda _: patch.object(runtime.Runtime, "soc_name", lambda self: "Ascend310P3"),
    "a copy": lambda _: patch.object(
        runtime.Runtime,
        "tensor_at",
        lambda self, address, num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
    ),
    "no RDMA": lambda _: patch.object(sys.modules["memfabric_hybrid"].shm, "create", _without_rdma),
    "nothing runs": _nothing_runs,
    "a lazy handle": lambda _: patch.object(
        FakeStream, "npu_stream", property(lambda self: 0x1000 + self.owner.streams.index(self))
    ),
    "an old scalar": _old_scalar,
    "flags first": _flags_first,
    "no events": lambda _: patch.object(FakeStream, "wait_event", lambda self, event: None),
    "no copy": lambda _: patch.object(runtime.Runtime, "copy", lambda self, to, source: None),
    "a leaky capture": _leaky_capture,
}
