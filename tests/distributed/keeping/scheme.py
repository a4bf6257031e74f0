"""`Keeping`: `Direct`, but for how results come to the window."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from moe_triton.core import native_files
from moe_triton.core.plan import Launch
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes import SCHEMES
from moe_triton.schemes.direct.scheme import Combine, Direct
from tests.distributed.cases import Case
from tests.distributed.keeping.ascendc import FUSED, KEEP_ROWS
from tests.distributed.workers import compare_rounds


class KeepingCombine(Combine):
    """`Direct`'s, with that kernel."""

    fused = FUSED

    def copy_results(self) -> Launch:
        values = {"row_bytes": self.layout.row_bytes, "slots": self.layout.results}
        return self.launch("copy", KEEP_ROWS, num_rows=self.num_results, **values)


class Keeping(Direct):
    """Results go to the window by a kernel of its own."""

    plans: ClassVar = {**Direct.plans, CombineVariant: KeepingCombine}


def compare(rank: int, num_ranks: int, case: Case, folder: str | None) -> list[str]:
    """See `compare_rounds`; with the library of a folder, or the installed one, which lacks the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEMES["A3"], "keeping", f"{__name__}:Keeping")
        if folder is not None:
            patch.setattr(native_files, "folders", lambda: (Path(folder),))
        return compare_rounds(rank, num_ranks, case)
