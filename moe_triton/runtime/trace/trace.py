"""One rank's trace: in memory until it is written."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from moe_triton.backends.base import Backend
from moe_triton.core.ascendc import TRACE_LINK
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime.trace.chrome import TracedRank, metadata, spans
from moe_triton.runtime.trace.file import TraceFile
from moe_triton.schemes.site import Site

MAX_EVENTS = 1 << 17  # that a rank keeps: 5 MB, and about 20 MB of JSON


class Trace:
    """What the calls of one rank did. Native code records it; Python does nothing in a call.

    Args:
        file: where it is written.
        traced: the rank that its events come from.
        backend: whose kernels are traced.
        counts: runs of each operator so far; kept up to date.
    """

    def __init__(
        self, file: TraceFile, traced: TracedRank, backend: Backend, counts: Mapping[str, int]
    ) -> None:
        self.file, self._traced = file, traced
        self._counts = counts
        self.log = backend.make_trace_log(MAX_EVENTS, traced.num_entries - 1)
        self._closed = False

    @classmethod
    def start(
        cls,
        file: TraceFile,
        site: Site,
        backend: Backend,
        counts: Mapping[str, int],
        meetings: Sequence[Meeting],
    ) -> Trace:
        """The trace of a rank of a group, which replaces the file if it is the group's first.

        Args:
            file: where it is written.
            site: where plans run.
            backend: whose kernels are traced.
            counts: runs of each operator so far; kept up to date.
            meetings: the group, and the tensor-parallel group if there is one.

        Raises:
            ArgumentError: the file cannot be written, or the back end has no traces.
        """
        ranks, *others = (meeting.world_ranks() for meeting in meetings)
        traced = TracedRank(site.config, site.rank, site.num_blocks, ranks, others[0] if others else ())
        trace = cls(file, traced, backend, counts)
        file.start(is_first=site.rank == 0)  # last: a back end without traces leaves the file alone
        return trace

    def write(self) -> None:
        """Appends what has happened since the last write to the file.

        Raises:
            OSError: it cannot be written.
        """
        calls, events, num_dropped = self.log.take()
        has_link = any(event.kind == TRACE_LINK for event in events)
        named = metadata(self._traced, num_dropped, has_link=has_link)
        self.file.add([*named, *spans(self._traced, calls, events, self._counts)])

    def close(self) -> None:
        """Writes for the last time. A failure is only a warning, so that closing goes on."""
        if self._closed:
            return
        self._closed = True
        try:
            self.write()
        except OSError as error:
            warnings.warn(f"no trace written to {self.file.path}: {error}", RuntimeWarning, stacklevel=2)
