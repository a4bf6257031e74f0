"""`Keeping`: `Direct`, but for how results come to the window."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_triton.core import native_files
from moe_triton.core.plan import Hole, Launch, joined, launch
from moe_triton.layout import WORD_BYTES
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes import SCHEMES
from moe_triton.schemes.direct.scheme import Direct
from tests.distributed.cases import Case
from tests.distributed.keeping.ascendc import FUSED, KEEP_ROWS
from tests.distributed.workers import compare_rounds


class Keeping(Direct):
    """Results go to the window by a kernel of its own."""

    def _combine(self, variant: CombineVariant, zone: int) -> list[Launch]:
        if variant.in_place:
            return super()._combine(variant, zone)
        results = self.layout.results_status
        phases = [self._post("flag", results, variant, zone), self._wait("wait", results, variant, zone)]
        return [*joined([self._keep(zone), *phases], FUSED), self._pull(variant, zone)]

    def _keep(self, zone: int) -> Launch:
        return launch(
            "copy",
            KEEP_ROWS,
            "communication",
            self.site.num_blocks,
            rows=Hole("y"),
            row_bytes=self.layout.row_bytes,
            num_rows=Hole("recv_offsets", WORD_BYTES * (self.site.num_entries - 1)),
            capacity=Hole("num_rows"),
            window=Hole("window"),
            **self.site.zone_of("combine", zone),
            slots=self.layout.results.words(),
            report=Hole("report"),
        )


def compare(rank: int, num_ranks: int, case: Case, folder: str | None) -> list[str]:
    """See `compare_rounds`; with the library of a folder, or the installed one, which lacks the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEMES["A3"], "keeping", f"{__name__}:Keeping")
        if folder is not None:
            patch.setattr(native_files, "folders", lambda: (Path(folder),))
        return compare_rounds(rank, num_ranks, case)
