"""What the report of a launch says."""

from __future__ import annotations

import torch

from moe_triton.core.ascendc import REPORT_MISMATCH
from moe_triton.core.records import REPORT


def first_code(report: torch.Tensor) -> tuple[int, int]:
    """The first code other than 0 in a launch's report, (phases, blocks, words) on the host; 0 for none.

    A mismatch comes first: it is why others time out.

    Returns:
        The code, and the number of the phase that reported it, among those that ran.
    """
    codes = report[:, :, REPORT.word("code")]
    found = (codes == REPORT_MISMATCH).nonzero()
    if not len(found):
        found = codes.nonzero()
    if not len(found):
        return 0, 0
    phase, block = found[0].tolist()
    return int(codes[phase, block]), phase
