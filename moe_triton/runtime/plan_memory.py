"""The memory that plans of one communicator share: windows, addresses of peers, zones, reports, scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from moe_triton.backends.base import Window
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.errors import BufferStateError
from moe_triton.core.kernel import MAX_PHASES
from moe_triton.core.records import TRAFFIC
from moe_triton.core.traffic import HOLE, Traffic
from moe_triton.schemes.scheme import Scheme
from moe_triton.schemes.site import CALL_WORDS, COUNTED, OPERATORS, Operator


class PlanMemory:
    """The contents of holes that are the same in every call.

    Args:
        scheme: whose plans share it.
        windows: in the scheme's order.
        device: of all tensors made here.

    Attributes:
        bindings: by the name of the hole.
        report: (phases of a launch, blocks, words) int32.
        posts: whether queues lead to some of this rank's peers.
    """

    def __init__(self, scheme: Scheme, windows: Sequence[Window], device: torch.device) -> None:
        self._scheme, self._device = scheme, device
        site = scheme.site
        self.posts = bool(scheme.queued_peers)
        self.report = torch.zeros(MAX_PHASES, site.num_blocks, REPORT_WORDS, dtype=torch.int32, device=device)
        self.bindings: dict[str, torch.Tensor] = {}
        for spec, window in zip(scheme.windows, windows, strict=True):
            prefix = spec.peers.prefix
            self.bindings[f"{prefix}window"] = window.tensor()
            self.bindings[f"{prefix}peers"] = torch.tensor(window.peers, dtype=torch.int64, device=device)
        if site.zones_on_device:
            self.bindings["zones"] = torch.zeros(2 * len(OPERATORS), dtype=torch.int32, device=device)
        self.bindings["call_words"] = torch.zeros(CALL_WORDS, dtype=torch.int32, device=device)
        self.bindings["report"] = self.report

    def add_scratch(self, holes: Iterable[str]) -> None:
        """Allocates the scratch memory of these holes that does not exist yet."""
        scratch = self._scheme.scratch()
        for hole in holes:
            if hole in scratch and hole not in self.bindings:
                elements, dtype, is_zeroed = scratch[hole]
                make = torch.zeros if is_zeroed else torch.empty
                self.bindings[hole] = make(elements, dtype=dtype, device=self._device)

    def traffic(self, operator: Operator) -> Traffic | None:
        """What the last dispatch or combine has posted; None where queues lead to no peer.

        Raises:
            BufferStateError: there was no call yet, or everything is given back.
        """
        if not self.posts:
            return None
        memory = self.bindings.get(HOLE)
        if memory is None:
            raise BufferStateError(f"there was no {operator} yet, or the buffer is closed")
        counters = memory.view(len(COUNTED), -1, TRAFFIC.num_words)[COUNTED.index(operator)]
        return Traffic.of(counters.sum(0).tolist())

    def private_bytes(self) -> int:
        """Bytes of all tensors, without the windows."""
        windows = {f"{spec.peers.prefix}window" for spec in self._scheme.windows}
        return sum(t.numel() * t.element_size() for name, t in self.bindings.items() if name not in windows)
