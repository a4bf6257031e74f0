"""How much memory is kept for later calls: outputs to use again, and plans of shapes that may come again."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

VARIABLE = "MOE_TRITON_KEPT_MB"
USUAL_MB = 64
_MOST_MB = 1 << 40


def kept_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Bytes that a buffer keeps at most of outputs, and as many of plans: $MOE_TRITON_KEPT_MB * 2**20.

    Raises:
        ArgumentError: the variable is no such number.
    """
    text = environment.get(VARIABLE, "") or str(USUAL_MB)
    if not (text.isdecimal() and text.isascii()) or int(text) > _MOST_MB:
        rule = f"it must be a whole number of MB, 0 to {_MOST_MB}"
        raise ArgumentError(VARIABLE, repr(text), rule, "Unset it.", code=INVALID_ARGUMENT)
    return int(text) << 20
